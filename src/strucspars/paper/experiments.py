"""Experiments, which are finished runs that differ only in their seed, and their numbers beside the paper's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from strucspars.data.catalogue import TEST_IMAGES
from strucspars.paper.noise import Difference, Sample, difference, sample_of
from strucspars.paper.published import PaperRow, base_row, published_row
from strucspars.train.outcome import RunSummary, read_summary
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_identity import changes, protocol, without_seed
from strucspars.train.recipe_reading import read_recipe, recipe_names
from strucspars.train.run_folder import RunFolder

# Image folders are of unknown size.
NUM_TEST_IMAGES: Mapping[str, int] = {"digits": TEST_IMAGES, "cifar10": 10_000, "cifar100": 10_000, "imagenet": 50_000}


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder, its recipe and its outcome."""

    path: Path
    recipe: Recipe
    summary: RunSummary


@dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """Finished runs of one recipe; `changes` are from the packaged recipe of its name, where there is one."""

    label: str
    runs: tuple[FinishedRun, ...]
    changes: tuple[str, ...]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the first run; the others differ in their seed."""
        return self.runs[0].recipe

    @property
    def first(self) -> RunSummary:
        """The outcome of the first run, for what all runs have in common."""
        return self.runs[0].summary

    @property
    def paper(self) -> PaperRow | None:
        """The paper's numbers for this recipe."""
        return published_row(self.recipe.name)

    @property
    def test_images(self) -> int | None:
        """Number of test images; None where unknown."""
        return NUM_TEST_IMAGES.get(self.first.data)

    def sample(self, number: Callable[[RunSummary], float | None]) -> Sample | None:
        """A number over the runs; None where no run has it."""
        return sample_of([value for run in self.runs if (value := number(run.summary)) is not None])


def experiments_of(runs: Iterable[FinishedRun]) -> tuple[Experiment, ...]:
    """Group runs by recipe, in the order given; seeds, places and devices do not matter."""
    grouped: dict[tuple[str, ...], list[FinishedRun]] = {}
    for run in runs:
        grouped.setdefault(protocol(run.recipe), []).append(run)
    first_of_name: dict[str, Recipe] = {}
    experiments = []
    for alike in grouped.values():
        recipe = alike[0].recipe
        changed = changes(recipe, first_of_name.setdefault(recipe.name, recipe))
        label = f"{recipe.name} ({', '.join(changed)})" if changed else recipe.name
        experiments.append(Experiment(label=label, runs=tuple(alike), changes=changes_from_package(recipe)))
    return tuple(experiments)


def changes_from_package(recipe: Recipe) -> tuple[str, ...]:
    """Where a recipe differs from the packaged one of its name, apart from seed, places and devices."""
    return changes(recipe, read_recipe(recipe.name)) if recipe.name in recipe_names() else ()


def difference_to_dense(experiment: Experiment, experiments: Sequence[Experiment]) -> Difference | None:
    """The difference to the dense experiment with the same network and data; None for a dense one."""
    wanted = (experiment.first.model, experiment.first.data)
    dense = next((e for e in experiments if e.first.kind == "dense" and (e.first.model, e.first.data) == wanted), None)
    if dense is None or experiment.first.kind == "dense":
        return None
    samples = (each.sample(lambda run: run.finetuned.last_top1) for each in (experiment, dense))
    return difference(*samples, test_images=experiment.test_images)


def base_experiment(experiment: Experiment, experiments: Sequence[Experiment]) -> Experiment | None:
    """The experiment that this one varies: with learned channel orders, or of the row that its name says."""
    recipe = experiment.recipe
    if recipe.finetune.ablation != "finetune":
        learned = replace(recipe, finetune=replace(recipe.finetune, ablation="finetune"))
        return next((other for other in experiments if not changes(other.recipe, learned)), None)
    name = base_row(recipe.name)
    return next((e for e in experiments if e.recipe.name == name and e.changes == experiment.changes), None)


def gain_over_base(experiment: Experiment, experiments: Sequence[Experiment]) -> Sample | None:
    """Percent points of accuracy over the base, from pairs of runs of the same seed; None without pairs."""
    base = base_experiment(experiment, experiments)
    if base is None:
        return None
    top1 = {run.recipe.seed: run.summary.finetuned.last_top1 for run in base.runs}
    pairs = [(run.summary.finetuned.last_top1, top1.get(run.recipe.seed)) for run in experiment.runs]
    return sample_of([100 * (mine - its) for mine, its in pairs if its is not None])


@dataclass(frozen=True)
class Collection:
    """The finished runs of some recipes in a folder; by path, why others are damaged or not counted."""

    experiments: tuple[Experiment, ...]
    unreadable: Mapping[Path, str]
    not_counted: Mapping[Path, str]


def collected(out: Path, names: Sequence[str]) -> Collection:
    """The finished runs of the named recipes among the run folders in `out`; other files there are ignored."""
    runs: dict[tuple[tuple[str, ...], int], FinishedRun] = {}
    unreadable: dict[Path, str] = {}
    not_counted: dict[Path, str] = {}
    for path in sorted(out.iterdir()) if out.is_dir() else []:
        folder = RunFolder(path)
        if not folder.recipe_path.is_file() or not folder.summary_json_path.is_file():
            continue
        try:
            recipe, summary = folder.load_recipe(), read_summary(folder)
        except (OSError, ValueError) as error:
            # Only the folder's name says whether the run belongs here.
            if without_seed(path.name) in names:
                unreadable[path] = f"{error}; repair, move or delete it"
            continue
        if recipe.name not in names or summary is None:
            continue
        run = FinishedRun(path, recipe, summary)
        counted = runs.setdefault((protocol(recipe), recipe.seed), run)
        if counted is not run:
            not_counted[path] = f"{counted.path} is a run of the same recipe and seed"
    ordered = sorted(runs.values(), key=lambda run: (names.index(run.recipe.name), run.recipe.seed))
    return Collection(experiments_of(ordered), unreadable, not_counted)


@dataclass(frozen=True)
class Measure:
    """A number that runs and rows of the paper have; where `is_judged`, its difference from the paper is shown."""

    key: str
    title: str
    unit: Literal["size", "percent", "number"]
    ours: Callable[[RunSummary], float | None]
    papers: Callable[[PaperRow], Sample | float | None] = lambda row: None
    is_judged: bool = False

    def paper(self, experiment: Experiment) -> Sample | None:
        """The paper's number for an experiment."""
        number = None if experiment.paper is None else self.papers(experiment.paper)
        return Sample(mean=number, deviation=None, count=1) if isinstance(number, float) else number

    def difference(self, experiment: Experiment) -> Difference | None:
        """Ours minus the paper's, in percent points."""
        ours, paper = experiment.sample(self.ours), self.paper(experiment)
        return difference(ours, paper, test_images=experiment.test_images)


PARAMS = Measure("params", "params", "size", lambda run: run.params.after, lambda row: row.params)
MACS = Measure("macs", "MACs", "size", lambda run: run.macs.after)
FLOPS = Measure("paper_flops", "FLOPs", "size", lambda run: run.paper_flops.after, lambda row: row.flops)
ACCURACY = Measure("top1", "top-1", "percent", lambda run: run.finetuned.last_top1, lambda row: row.top1, True)
# The authors' code reports the best epoch, so the paper's accuracies are compared with both.
BEST = Measure("best_top1", "best epoch", "percent", lambda run: run.finetuned.best_top1, lambda row: row.top1, True)
TOP5 = Measure("top5", "top-5", "percent", lambda run: run.finetuned.last_top5, lambda row: row.top5)
BEFORE = Measure(
    "before_compression",
    "before",
    "percent",
    lambda run: run.before_compression_top1,
    lambda row: row.before_compression,
)
AFTER = Measure(
    "after_compression", "after", "percent", lambda run: run.compressed_top1, lambda row: row.after_compression
)
THRESHOLD = Measure(
    "min_kept_norm", "min_kept_norm", "number", lambda run: run.min_kept_norm, lambda row: row.min_kept_norm
)

_SIZE_AND_ACCURACY = (PARAMS, MACS, FLOPS, ACCURACY, BEST)
MEASURES: Mapping[str, tuple[Measure, ...]] = {
    "table1": _SIZE_AND_ACCURACY,
    "table2": _SIZE_AND_ACCURACY,
    "table3": (PARAMS, ACCURACY, BEST, TOP5),
    "table5": (BEFORE, AFTER, ACCURACY, BEST, THRESHOLD),
}


def comparison_document(
    table: str, experiments: Sequence[Experiment], others: Sequence[Experiment]
) -> list[dict[str, Any]]:
    """A table's rows for a program, accuracies in percent; `others` may be the base of a row."""
    rows = []
    for experiment in experiments:
        row: dict[str, Any] = {"row": experiment.label, "runs": len(experiment.runs)}
        row |= {measure.key: _measure_document(measure, experiment) for measure in MEASURES[table]}
        gain = gain_over_base(experiment, others)
        if gain is not None:
            row["over_base"] = {"mean": gain.mean, "deviation": gain.deviation, "pairs": gain.count}
        rows.append(row)
    return rows


def _measure_document(measure: Measure, experiment: Experiment) -> dict[str, Any]:
    ours, paper = experiment.sample(measure.ours), measure.paper(experiment)
    scale = 100.0 if measure.unit == "percent" else 1.0
    document: dict[str, Any] = {}
    for sample, mean, deviation in ((ours, "mean", "deviation"), (paper, "paper", "paper_deviation")):
        spread = None if sample is None else sample.deviation
        document[mean] = None if sample is None else scale * sample.mean
        document[deviation] = None if spread is None else scale * spread
    document["difference"] = scale * (ours.mean - paper.mean) if ours and paper else None
    if measure.is_judged:
        judged = measure.difference(experiment)
        above_or_below = "above" if judged is not None and judged.points > 0 else "below"
        document["verdict"] = None if judged is None else "noise" if judged.is_within_noise else above_or_below
    return document
