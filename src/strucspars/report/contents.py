"""What stands in a report: figures, tables and pictures of one run, and of several beside each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strucspars.report.comparison_tables import comparison_tables
from strucspars.report.experiments import Experiment, experiments_of
from strucspars.report.figures.cardinality import cardinality_figure, cardinality_of
from strucspars.report.figures.churn import churn_figure, churn_of
from strucspars.report.figures.confusion import Confusion, chosen_confusions, confusion_figure, confusions_of
from strucspars.report.figures.dynamics import dynamics_figure, dynamics_of
from strucspars.report.figures.importance import (
    LayerPictures,
    LevelPictures,
    chosen_layers,
    importance_figure,
    layer_pictures,
    level_pictures,
)
from strucspars.report.figures.trade_off import trade_off_figure
from strucspars.report.headlines import Headline, headlines
from strucspars.report.named_figure import NamedFigure
from strucspars.report.named_table import NamedTable
from strucspars.report.run_reading import RunData
from strucspars.report.tables import confusion_table, run_tables
from strucspars.report.trade_off_points import latency_note, points_of
from strucspars.training.recipe import SparsifyRecipe

# Wider tables nobody reads; the figure shows them.
MOST_TABLE_GROUPS = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class RunContents:
    """What there is to show of one run.

    Attributes:
        run: what was read; its `problems` name what is missing.
        headlines: come first.
        figures: in the order to show them.
        tables: likewise; the one named `layers` is worth sorting.
        layers: pictures of every layer's importance matrix, in network order; empty where none was stored.
        levels: pictures of R_g and U_g that all layers share.
    """

    run: RunData
    headlines: tuple[Headline, ...]
    figures: tuple[NamedFigure, ...]
    tables: tuple[NamedTable, ...]
    layers: tuple[LayerPictures, ...]
    levels: LevelPictures


@dataclass(frozen=True, eq=False, kw_only=True)
class ComparisonContents:
    """What there is to show of several runs beside each other; both are empty where no run is finished."""

    figures: tuple[NamedFigure, ...]
    tables: tuple[NamedTable, ...]


def run_contents(run: RunData) -> RunContents:
    """Everything to show of one run, as far as there is something; never fails on what a folder lacks."""
    confusions = () if run.plan is None else chosen_confusions(confusions_of(run.plan))
    decay = SparsifyRecipe().decay if run.recipe is None else run.recipe.sparsify.decay
    layers = layer_pictures(run)
    return RunContents(
        run=run,
        headlines=headlines(run),
        figures=tuple(_figures(run, confusions, decay)),
        tables=(*run_tables(run), *_confusion_tables(confusions)),
        layers=layers,
        levels=level_pictures(layers, decay=decay),
    )


def _figures(run: RunData, confusions: Sequence[Confusion], decay: float) -> Iterator[NamedFigure]:
    dynamics, cardinality, churn = dynamics_of(run), cardinality_of(run), churn_of(run)
    if dynamics.epochs:
        yield dynamics_figure(dynamics)
    if cardinality.names:
        yield cardinality_figure(cardinality)
    if confusions:
        yield confusion_figure(confusions)
    if len(churn.epochs):
        yield churn_figure(churn)
    for layer in chosen_layers(run):
        yield importance_figure(layer, decay=decay)


def _confusion_tables(confusions: Sequence[Confusion]) -> Iterator[NamedTable]:
    for number, confusion in enumerate(confusions, start=1):
        if max(confusion.learned.shape) <= MOST_TABLE_GROUPS:
            yield confusion_table(confusion, number)


def comparison_contents(runs: Sequence[RunData]) -> ComparisonContents:
    """Everything to show of several runs: accuracy against cost, and the paper's tables with our numbers."""
    experiments = experiments_of(runs)
    return ComparisonContents(figures=tuple(_trade_offs(experiments)), tables=comparison_tables(experiments))


def _trade_offs(experiments: Sequence[Experiment]) -> Iterator[NamedFigure]:
    """One for every data set: accuracies on different images do not stand on one axis."""
    for data in dict.fromkeys(experiment.first.data for experiment in experiments):
        alike = [experiment for experiment in experiments if experiment.first.data == data]
        yield trade_off_figure(points_of(alike), data=data, note=latency_note(alike))
