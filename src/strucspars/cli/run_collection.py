"""The finished runs in a folder, by row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strucspars.cli.run import run_name
from strucspars.train.outcome import RunSummary, read_summary
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_identity import changes, without_seed
from strucspars.train.run_folder import RunFolder


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end: where it lies, what it was to do, what it came to."""

    path: Path
    recipe: Recipe
    summary: RunSummary


@dataclass(frozen=True)
class Collection:
    """What a folder of run folders holds.

    Attributes:
        rows: by recipe, its finished runs, by seed.
        unreadable: run folders that are damaged, and how.
        misnamed: run folders that are not called as their row and seed are, and how they should be.
    """

    rows: Mapping[str, Sequence[FinishedRun]]
    unreadable: Mapping[Path, str]
    misnamed: Mapping[Path, str]

    def comparable(self, name: str) -> Sequence[FinishedRun]:
        """The runs of a row.

        Raises:
            ValueError: they follow different protocols, so their mean would mean nothing.
        """
        runs = self.rows.get(name, ())
        check_one_protocol({run.path: run.recipe for run in runs})
        return runs


def check_one_protocol(recipes: Mapping[Path, Recipe]) -> None:
    """Refuse runs of one row that follow different protocols.

    Raises:
        ValueError: names two of them, and what the latter has otherwise.
    """
    first = next(iter(recipes), None)
    for path, recipe in recipes.items():
        if first is not None and (changed := changes(recipe, recipes[first])):
            raise ValueError(
                f"{first} and {path} are called the same row, but the latter has {', '.join(changed)}; "
                "keep runs of another protocol in another folder"
            )


def collected(out: Path, names: Sequence[str]) -> Collection:
    """The finished runs of some rows in a folder; whatever else lies there is none of our business.

    Args:
        out: folder of run folders.
        names: of the rows.
    """
    rows: dict[str, list[FinishedRun]] = {}
    unreadable: dict[Path, str] = {}
    misnamed: dict[Path, str] = {}
    for path in sorted(out.iterdir()) if out.is_dir() else []:
        try:
            run = _finished_run(path, names)
        except (OSError, ValueError) as error:
            unreadable[path] = f"{error}; repair, move or delete it"
            continue
        if run is None:
            continue
        if path.name == run_name(run.recipe):
            rows.setdefault(run.recipe.name, []).append(run)
        else:
            misnamed[path] = (
                f"it is {run.recipe.name} with seed {run.recipe.seed}, whose folder is called {run_name(run.recipe)}; "
                "rename it if it belongs to the row"
            )
    for runs in rows.values():
        runs.sort(key=lambda run: run.recipe.seed)
    return Collection(rows, unreadable, misnamed)


def _finished_run(path: Path, names: Sequence[str]) -> FinishedRun | None:
    """The run in a folder; None if there is none, it is not finished, or of no such row."""
    folder = RunFolder(path)
    if not folder.recipe_path.is_file() or not folder.summary_json_path.is_file():
        return None
    try:
        recipe = folder.load_recipe()
    except (OSError, ValueError):
        # Then the folder's name is all that tells whether it should be there.
        if without_seed(path.name) not in names:
            return None
        raise
    if recipe.name not in names:
        return None
    summary = read_summary(folder)
    if summary is None:
        return None
    if (summary.name, summary.seed) != (recipe.name, recipe.seed):
        raise ValueError(
            f"its recipe is {recipe.name} with seed {recipe.seed}, but its summary of {summary.name} with seed "
            f"{summary.seed}"
        )
    return FinishedRun(path, recipe, summary)
