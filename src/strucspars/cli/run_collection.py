"""The finished runs in a folder, by row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strucspars.cli.running import run_name
from strucspars.runs.folder import RunFolder
from strucspars.training.outcome import RunSummary, read_summary
from strucspars.training.recipe import Recipe
from strucspars.training.recipe_identity import changes
from strucspars.training.recipe_reading import read_recipe


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
        unreadable: run folders that are not what they should be, and why.
    """

    rows: Mapping[str, Sequence[FinishedRun]]
    unreadable: Mapping[Path, str]

    def comparable(self, name: str) -> Sequence[FinishedRun]:
        """The runs of a row.

        Raises:
            ValueError: they follow different protocols, so their mean would mean nothing.
        """
        runs = self.rows.get(name, ())
        for run in runs:
            if changed := changes(run.recipe, runs[0].recipe):
                raise ValueError(
                    f"{runs[0].path} and {run.path} are called the same row, but the latter has {', '.join(changed)}; "
                    "keep runs of another protocol in another folder"
                )
        return runs


def collected(out: Path) -> Collection:
    """The finished runs in a folder; whatever else lies there is none of our business.

    Args:
        out: folder of run folders.
    """
    rows: dict[str, list[FinishedRun]] = {}
    unreadable: dict[Path, str] = {}
    for path in sorted(out.iterdir()) if out.is_dir() else []:
        try:
            run = _finished_run(path)
        except (OSError, ValueError) as error:
            unreadable[path] = f"{error}; repair, move or delete it"
            continue
        if run is not None:
            rows.setdefault(run.recipe.name, []).append(run)
    for runs in rows.values():
        runs.sort(key=lambda run: run.recipe.seed)
    return Collection(rows, unreadable)


def _finished_run(path: Path) -> FinishedRun | None:
    """The run in a folder; None if there is none, or it is not finished."""
    folder = RunFolder(path)
    if not folder.recipe_path.is_file() or not folder.summary_json_path.is_file():
        return None
    recipe, summary = read_recipe(folder.recipe_path), read_summary(folder)
    if summary is None:
        return None
    if (summary.name, summary.seed) != (recipe.name, recipe.seed) or path.name != run_name(recipe):
        raise ValueError(
            f"{path} should be called {run_name(recipe)}: its recipe is {recipe.name} with seed {recipe.seed}, "
            f"its summary of {summary.name} with seed {summary.seed}"
        )
    return FinishedRun(path, recipe, summary)
