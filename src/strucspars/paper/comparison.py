"""Results of experiments beside the paper's numbers: the columns of Tables 1, 2, 3 and 5."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strucspars.paper.experiments import Experiment, gain_over_base
from strucspars.paper.noise import Difference, Sample, difference
from strucspars.paper.published import PaperRow
from strucspars.train.outcome import RunSummary


@dataclass(frozen=True)
class Measure:
    """A number that runs and rows of the paper have.

    Attributes:
        key: its name in JSON, where fractions are in percent.
        title: its name in tables.
        unit: how it is written.
        ours, papers: how to look it up.
        is_judged: whether the difference from the paper is shown.
    """

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
    """A table's rows for a program, accuracies in percent.

    Args:
        table: such as `table1`.
        experiments: its rows.
        others: experiments that may be the base of a row.
    """
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
