"""Runs of one recipe with several seeds, taken together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strucspars.data.catalogue import TEST_IMAGES
from strucspars.paper.measured import Sample, sample_of
from strucspars.report.reading import RunData
from strucspars.train.outcome import RunSummary
from strucspars.train.outcome_text import changes_from_paper
from strucspars.train.paper_rows import PAPER_ROWS, PAPER_TIMELINES, PaperRow, PaperTimeline
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_identity import changes, protocol

# Of the data sets whose test images are always the same ones.
NUM_TEST_IMAGES: Mapping[str, int] = {"digits": TEST_IMAGES, "cifar10": 10_000, "cifar100": 10_000, "imagenet": 50_000}
PAPER_RUNS = 10


@dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """Finished runs that differ in nothing but their seed.

    Attributes:
        label: the recipe's name, and what was changed where several recipes have that name.
        runs: at least one.
        paper: the paper's row of the recipe's name; None if it has none.
        timeline: the paper's numbers of the stages, likewise.
        changes: where the recipe differs from that of the paper's row, such as `engine.precision=bf16`.
    """

    label: str
    runs: tuple[RunData, ...]
    paper: PaperRow | None
    timeline: PaperTimeline | None
    changes: tuple[str, ...]

    @property
    def summaries(self) -> tuple[RunSummary, ...]:
        """What the runs came to."""
        return tuple(run.summary for run in self.runs if run.summary is not None)

    @property
    def first(self) -> RunSummary:
        """The summary of the first run, for what all have in common."""
        return self.summaries[0]

    @property
    def test_images(self) -> int | None:
        """How many images it was tested on; None for image folders of unknown size."""
        return NUM_TEST_IMAGES.get(self.first.data)

    def sample(self, number: Callable[[RunSummary], float | None]) -> Sample | None:
        """A number of every run; None where no run has it."""
        return sample_of([value for value in map(number, self.summaries) if value is not None])


def paper_accuracy(row: PaperRow | None) -> Sample | None:
    """The paper's top-1 as a fraction; None where it has none."""
    if row is None or row.accuracy is None:
        return None
    if row.accuracy_deviation is None:
        return Sample(mean=row.accuracy / 100, deviation=None, count=1)
    return Sample(mean=row.accuracy / 100, deviation=row.accuracy_deviation / 100, count=PAPER_RUNS)


def experiments_of(runs: Sequence[RunData]) -> tuple[Experiment, ...]:
    """The finished runs by recipe, seeds, places and devices aside, in the order in which they were given."""
    grouped: dict[Any, list[RunData]] = {}
    for run in runs:
        if run.summary is not None:
            grouped.setdefault(_same_key(run, run.summary), []).append(run)
    first_of_name: dict[str, Recipe | None] = {}
    experiments = []
    for alike in grouped.values():
        first = alike[0]
        assert first.summary is not None
        name = first.summary.name
        label = _label(name, first.recipe, first_of_name.setdefault(name, first.recipe))
        experiments.append(
            Experiment(
                label=label,
                runs=tuple(alike),
                paper=PAPER_ROWS.get(name),
                timeline=PAPER_TIMELINES.get(name),
                changes=changes_from_paper(first.recipe),
            )
        )
    return tuple(experiments)


def _same_key(run: RunData, summary: RunSummary) -> Any:
    """What runs of one experiment have in common."""
    if run.recipe is None:
        return summary.name, summary.kind, summary.model, summary.data, summary.target
    return protocol(run.recipe)


def _label(name: str, recipe: Recipe | None, first: Recipe | None) -> str:
    """The name, and what is different from the first recipe of that name."""
    if recipe is None or first is None:
        return name
    changed = changes(recipe, first)
    return f"{name} ({', '.join(changed)})" if changed else name


def dense_counterpart(experiment: Experiment, experiments: Sequence[Experiment]) -> Experiment | None:
    """The dense experiment with the same network and data; None if there is none, and for a dense one itself."""
    if experiment.first.kind == "dense":
        return None
    wanted = (experiment.first.model, experiment.first.data)
    dense = [other for other in experiments if other.first.kind == "dense"]
    return next((other for other in dense if (other.first.model, other.first.data) == wanted), None)
