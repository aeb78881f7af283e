"""Several runs: which belong together, what they come to, and what the paper has beside them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Annotation

from strucspars.bench.results import BenchReport, BenchRow, Ratio, RowSize, RowTiming
from strucspars.cost.counting import BeforeAfter
from strucspars.data.catalogue import TEST_IMAGES
from strucspars.paper.experiments import Experiment, FinishedRun, experiments_of
from strucspars.paper.noise import Difference, Sample, sample_of
from strucspars.paper.published import OTHER_METHODS, PAPER_ROWS
from strucspars.report.contents import comparison_contents, headlines
from strucspars.report.drawing import PALETTE
from strucspars.report.named_table import Cell, NamedTable
from strucspars.report.reading import RunData, read_run
from strucspars.report.tables import beside_the_paper, comparison_table, comparison_tables
from strucspars.report.trade_off import (
    MOST_LABELS,
    Point,
    comparable_latencies,
    fastest,
    plotted_costs,
    points_of,
    trade_off_figure,
)
from strucspars.train.outcome import StageAccuracy
from strucspars.train.recipe_reading import read_recipe

DENSE = ("cifar10-resnet20-dense", "imagenet-resnet50-dense")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes={"conv": (8, 8, 1, 1)}, recipe=small_recipe()))
    return read_run(path)


def finished(template: RunData, name: str, top1: float, *overrides: str, seed: int = 0) -> RunData:
    """A run of a recipe that came to this accuracy."""
    recipe = read_recipe(name, [*overrides, f"seed={seed}"])
    assert template.summary is not None
    accuracy = replace(template.summary.finetuned, last_top1=top1, best_top1=top1 + 0.001)
    kind = recipe.kind
    summary = replace(
        template.summary,
        name=recipe.name,
        kind=kind,
        seed=seed,
        model=recipe.model.name,
        data=recipe.data.name,
        target=None if kind == "dense" else recipe.sparsify.target,
        before_compression_top1=None if kind == "dense" else 0.86,
        finetuned=accuracy,
        params=BeforeAfter(219_482, 219_482 if kind == "dense" else 130_394),
    )
    return replace(
        template,
        recipe=recipe,
        summary=summary,
        name=recipe.name,
        path=Path(" ".join((recipe.name, *overrides, str(seed)))),
    )


def unlike(run: RunData, *, step: int = 0) -> RunData:
    """The run with numbers of which no two are alike, those of the next step a little larger."""
    assert run.summary is not None
    summary = replace(
        run.summary,
        params=BeforeAfter(10_000, 7_000 + 100 * step),
        macs=BeforeAfter(50_000, 30_000 + 100 * step),
        paper_flops=BeforeAfter(60_000, 40_000 + 100 * step),
        removed_param_fraction=0.30 + 0.01 * step,
        removed_mac_fraction=0.40 + 0.01 * step,
        before_compression_top1=0.86 + 0.01 * step,
        compressed_top1=0.50 + 0.01 * step,
        min_kept_norm=0.77 + 0.01 * step,
        finetuned=StageAccuracy(
            last_top1=0.91 + 0.01 * step,
            last_top5=0.97 + 0.01 * step,
            best_top1=0.93 + 0.01 * step,
            best_top5=0.98 + 0.01 * step,
            best_epoch=2,
        ),
        converted_top1=0.12,
        converted_top5=0.34,
    )
    return replace(run, summary=summary)


def experiments(runs: Sequence[RunData]) -> tuple[Experiment, ...]:
    return experiments_of(FinishedRun(run.path, run.recipe, run.summary) for run in runs if run.summary is not None)


def accuracy_table(found: Sequence[Experiment]) -> NamedTable:
    return comparison_table("table1", found, found)


def cell(table: NamedTable, row: int, title: str) -> Cell:
    return table.rows[row][list(table.columns).index(title)]


def mean(table: NamedTable, row: int, title: str) -> float:
    found = cell(table, row, title)
    assert isinstance(found, Sample)
    return found.mean


def difference(table: NamedTable, row: int, title: str) -> tuple[float, bool]:
    found = cell(table, row, title)
    assert isinstance(found, Difference)
    return round(found.points, 6), found.is_within_noise


def test_seeds_devices_and_places_make_no_other_experiment(template: RunData) -> None:
    runs = [
        finished(template, "cifar10-resnet20-40", 0.91, "data.root=here"),
        finished(template, "cifar10-resnet20-40", 0.92, "data.root=there", "engine.device=cpu", seed=1),
        finished(template, "cifar10-resnet20-40", 0.90, "stage2.epochs=3", seed=2),
        finished(template, "cifar10-resnet20-dense", 0.93),
    ]
    found = experiments(runs)
    assert [len(experiment.runs) for experiment in found] == [2, 1, 1]
    assert found[0].label == "cifar10-resnet20-40"
    assert "stage2.epochs=3" in found[1].label
    assert found[0].changes == ()
    assert "stage2.epochs=3" in found[1].changes


def test_runs_that_are_not_finished_are_left_out(template: RunData) -> None:
    contents = comparison_contents([replace(template, summary=None)])
    assert (contents.figures, contents.tables) == ((), ())


def test_a_sample_has_the_deviation_of_a_sample() -> None:
    assert sample_of([]) is None
    assert sample_of([0.5]) == Sample(mean=0.5, deviation=None, count=1)
    sample = sample_of([0.90, 0.91, 0.95])
    assert sample is not None
    assert sample.deviation == pytest.approx(np.std([0.90, 0.91, 0.95], ddof=1))


def test_the_accuracy_table_compares_with_the_paper_and_with_our_dense_network(template: RunData) -> None:
    runs = [
        finished(template, "cifar10-resnet20-dense", 0.9170),
        finished(template, "cifar10-resnet20-40", 0.9130),
        finished(template, "cifar10-resnet20-40", 0.9150, seed=1),
        finished(template, "cifar10-resnet20-20", 0.8000),
    ]
    table = accuracy_table(experiments(runs))
    assert [row[0] for row in table.rows] == ["cifar10-resnet20-dense", "cifar10-resnet20-40", "cifar10-resnet20-20"]
    assert mean(table, 1, "params") == 130_394
    assert mean(table, 1, "paper params") == 131_000
    assert cell(table, 1, "top-1") == sample_of([0.9130, 0.9150])
    assert cell(table, 1, "paper top-1") == PAPER_ROWS["cifar10-resnet20-40"].top1
    assert difference(table, 1, "to paper") == (-0.02, True)
    assert difference(table, 1, "to dense") == (-0.3, True)
    assert difference(table, 2, "to dense") == (-11.7, False)
    assert cell(table, 0, "to dense") is None
    written = dict(zip(table.columns, table.written_rows()[1], strict=True))
    assert (written["params"], written["top-1"], written["to dense"]) == ("130K", "91.40 ± 0.14%", "-0.30, noise")
    assert any("t-test" in note for note in table.notes)


def test_every_column_of_the_accuracy_table_has_its_own_number(template: RunData) -> None:
    name = "cifar10-resnet20-40"
    runs = [unlike(finished(template, name, 0.9, seed=seed), step=2 * seed) for seed in (0, 1)]
    table = accuracy_table(experiments(runs))
    numbers = {title: mean(table, 0, title) for title in ("params", "FLOPs", "paper params", "paper FLOPs")}
    paper = PAPER_ROWS[name]
    assert numbers == {
        "params": 7_100,
        "FLOPs": 40_100,
        "paper params": paper.params,
        "paper FLOPs": paper.flops,
    }
    assert mean(table, 0, "best epoch") == pytest.approx(0.94)


def test_the_papers_accuracy_is_that_of_ten_runs_where_it_has_a_deviation() -> None:
    several, single = (PAPER_ROWS[name].top1 for name in ("cifar10-resnet20-40", "imagenet-resnet50-65"))
    assert [several.mean, several.deviation, several.count] == pytest.approx([0.9142, 0.0004, 10])
    assert (single.deviation, single.count) == (None, 1)
    assert single.mean == pytest.approx(0.751)


def test_single_runs_are_within_noise_by_the_images_of_their_data(template: RunData) -> None:
    images = {name: experiments([finished(template, name, 0.9)])[0].test_images for name in ("demo", *DENSE)}
    assert images == {"demo": TEST_IMAGES, "cifar10-resnet20-dense": 10_000, "imagenet-resnet50-dense": 50_000}
    runs = [finished(template, "cifar10-resnet20-dense", 0.9145), finished(template, "cifar10-resnet20-40", 0.9105)]
    table = accuracy_table(experiments(runs))
    assert difference(table, 1, "to dense") == (-0.4, True)
    assert difference(table, 1, "to paper") == (-0.37, True)
    large = [finished(template, "imagenet-resnet50-dense", 0.761), finished(template, "imagenet-resnet50-65", 0.756)]
    assert difference(accuracy_table(experiments(large)), 1, "to dense") == (-0.5, False)


def test_a_dense_network_on_other_data_is_no_counterpart(template: RunData) -> None:
    runs = [
        finished(template, "cifar10-resnet20-dense", 0.70, "data.name=cifar100"),
        finished(template, "cifar10-resnet20-40", 0.91),
    ]
    assert "to dense" not in accuracy_table(experiments(runs)).columns
    runs.append(finished(template, "cifar10-resnet20-dense", 0.92))
    assert difference(accuracy_table(experiments(runs)), 1, "to dense")[0] == -1.0


def test_changed_recipes_are_named_below_the_table(template: RunData) -> None:
    runs = [finished(template, "cifar10-resnet20-40", 0.9, "engine.precision=bf16")]
    table = accuracy_table(experiments(runs))
    assert "Not quite as in the recipes: engine.precision=bf16." in table.notes
    assert cell(table, 0, "paper top-1") is not None


def test_tables_have_no_empty_columns_and_only_rows_that_belong_there(template: RunData) -> None:
    runs = [finished(template, "demo", 0.9), finished(template, "demo-dense", 0.95)]
    tables = {table.name: table for table in comparison_tables(experiments(runs))}
    assert set(tables) == {"accuracy", "timeline"}
    assert "paper top-1" not in tables["accuracy"].columns
    assert [row[0] for row in tables["timeline"].rows] == ["demo"]


def test_the_timeline_has_the_papers_thresholds(template: RunData) -> None:
    runs = [finished(template, "imagenet-resnet50-65", 0.75)]
    tables = {table.name: table for table in comparison_tables(experiments(runs))}
    assert mean(tables["timeline"], 0, "paper before") == pytest.approx(0.6636)
    assert mean(tables["timeline"], 0, "paper min_kept_norm") == pytest.approx(0.885)
    assert any("kept share" in note for note in tables["timeline"].notes)


def test_every_column_of_the_timeline_has_its_own_number(template: RunData) -> None:
    runs = [unlike(finished(template, "imagenet-resnet50-65", 0.75, seed=seed), step=seed) for seed in (0, 1)]
    found = experiments(runs)
    table = comparison_table("table5", found, found)
    own = {
        "before": ((0.86, 0.87), 0.6636),
        "after": ((0.50, 0.51), 0.4278),
        "top-1": ((0.91, 0.92), 0.7510),
        "min_kept_norm": ((0.77, 0.78), 0.885),
    }
    for title, (ours, papers) in own.items():
        sample = cell(table, 0, title)
        assert isinstance(sample, Sample)
        assert [sample.mean, sample.count] == pytest.approx([sum(ours) / 2, 2])
        assert mean(table, 0, f"paper {title}") == pytest.approx(papers)


def variants(runs: Sequence[RunData]) -> NamedTable:
    """The table of variants against their base."""
    (table,) = (table for table in comparison_tables(experiments(runs)) if table.name == "ablation")
    return table


def test_ablations_are_compared_with_learned_orders_of_the_same_seed(template: RunData) -> None:
    name = "cifar10-resnet56-60"
    runs = [
        finished(template, name, 0.930),
        finished(template, name, 0.950, seed=1),
        finished(template, f"{name}-random", 0.880),
        finished(template, f"{name}-from-scratch", 0.931, seed=1),
        finished(template, "cifar10-resnet20-40", 0.91),
    ]
    table = variants(runs)
    assert [row[0] for row in table.rows] == [name, f"{name}-random", f"{name}-from-scratch"]
    assert cell(table, 0, "to base") is None
    assert mean(table, 1, "to base") == pytest.approx(-5.0)
    assert mean(table, 2, "to base") == pytest.approx(-1.9)


def test_ablations_of_own_recipes_are_compared_by_what_they_do(template: RunData) -> None:
    own = ("name=mine", "sparsify.target=0.3")
    runs = [
        finished(template, "demo", 0.9, *own),
        finished(template, "demo", 0.8, *own, "name=other", "finetune.ablation=random"),
    ]
    assert mean(variants(runs), 1, "to base") == pytest.approx(-10.0)


def test_every_column_of_the_ablation_table_has_its_own_number(template: RunData) -> None:
    name = "imagenet-resnet50-65"
    table = variants([unlike(finished(template, each, 0.75)) for each in (name, f"{name}-random")])
    titles = ("top-5", "paper top-1", "paper top-5")
    assert [[mean(table, row, title) for title in titles] for row in (0, 1)] == [
        pytest.approx([0.97, 0.7510, 0.9252]),
        pytest.approx([0.97, 0.6945, 0.8945]),
    ]


def test_without_a_variant_there_is_no_table_of_them(template: RunData) -> None:
    name = "cifar10-resnet56-60"
    runs = [finished(template, name, 0.93), finished(template, name, 0.92, "stage2.epochs=3")]
    assert "ablation" not in {table.name for table in comparison_tables(experiments(runs))}


def test_variants_are_compared_only_where_both_have_the_same_changes(template: RunData) -> None:
    name = "cifar10-resnet56-60"
    runs = [
        finished(template, name, 0.93),
        finished(template, f"{name}-distilled", 0.95),
        finished(template, f"{name}-random", 0.92),
        finished(template, f"{name}-no-shuffle", 0.91, "stage2.epochs=3"),
        finished(template, f"{name}-low-rate", 0.91, "stage2.epochs=3"),
    ]
    table = variants(runs)
    assert [row[0] for row in table.rows] == [name, f"{name}-distilled", f"{name}-random"]
    assert mean(table, 1, "to base") == pytest.approx(2.0)


def test_a_variant_is_held_against_the_papers_row_of_its_base(template: RunData) -> None:
    (experiment,) = experiments([finished(template, "cifar10-resnet20-40-distilled", 0.92)])
    assert experiment.paper == PAPER_ROWS["cifar10-resnet20-40"]
    (slimmed,) = experiments([finished(template, "cifar10-resnet20-40-slimming", 0.92)])
    assert slimmed.paper is None


def test_operations_are_counted_as_in_the_paper_only_beside_its_numbers(template: RunData) -> None:
    demo, paper = finished(template, "demo", 0.91), finished(template, "cifar10-resnet20-40", 0.92)
    for runs, shown in (([demo], "MACs"), ([demo, paper], "FLOPs")):
        assert accuracy_table(experiments(runs)).columns.keys() & {"MACs", "FLOPs"} == {shown}


def test_runs_of_the_paper_stand_beside_it_in_the_terminal_and_others_do_not(template: RunData) -> None:
    run = finished(template, "imagenet-resnet50-65", 0.75)
    assert run.summary is not None
    texts = beside_the_paper([FinishedRun(run.path, run.recipe, run.summary)])
    assert ["75.10%" in text and "imagenet-resnet50-65" in text for text in texts] == [True, True]
    own = replace(run, recipe=replace(run.recipe, name="mine"))
    assert own.summary is not None
    assert beside_the_paper([FinishedRun(own.path, own.recipe, own.summary)]) == []


def test_variants_have_the_colour_of_their_network_and_no_place_on_its_line(template: RunData) -> None:
    name = "cifar10-resnet20-40"
    runs = [
        finished(template, name, 0.91),
        finished(template, f"{name}-distilled", 0.92),
        finished(template, name, 0.90, "stage2.lr=0.05"),
        finished(template, "cifar10-resnet56-60-random", 0.93),
        finished(template, "cifar10-resnet20-dense", 0.915),
    ]
    points = [point for point in points_of(experiments(runs)) if point.is_ours]
    assert [(point.network, point.label, point.is_on_line) for point in points] == [
        ("cifar10-resnet20", "40%", True),
        ("cifar10-resnet20", "distilled", False),
        ("cifar10-resnet20", "(stage2.lr=0.05)", False),
        ("cifar10-resnet56", "", False),
        ("cifar10-resnet20", "", True),
    ]


def test_points_are_our_experiments_and_the_papers_rows_of_the_same_network(template: RunData) -> None:
    runs = [finished(template, "cifar10-resnet20-40", 0.91), finished(template, "cifar10-resnet20-40", 0.93, seed=1)]
    ours, *papers = points_of(experiments(runs))
    assert (ours.is_ours, ours.network, ours.method, ours.label, ours.accuracy.count) == (
        True,
        "cifar10-resnet20",
        "strucspars",
        "40%",
        2,
    )
    assert ours.accuracy.mean == pytest.approx(0.92)
    assert ours.costs["params"] == 130_394
    assert {(point.method, point.label) for point in papers} == {
        ("dense", ""),
        ("strucspars", "20%"),
        ("strucspars", "40%"),
        ("slimming", "40%"),
        ("slimming", "60%"),
    }


def test_points_have_their_own_costs_and_deviations(template: RunData) -> None:
    runs = [unlike(finished(template, "cifar10-resnet20-40", 0.9, seed=seed), step=2 * seed) for seed in (0, 1)]
    ours, *papers = points_of(experiments(runs))
    assert ours.costs == {"params": 7_100, "macs": 30_100, "paper_flops": 40_100}
    assert ours.accuracy.deviation == pytest.approx(np.std([0.91, 0.93], ddof=1))
    row = PAPER_ROWS["cifar10-resnet20-slimming60"]
    (slimming,) = (point for point in papers if (point.method, point.label) == ("slimming", "60%"))
    assert slimming.costs == {"params": row.params, "paper_flops": row.flops}
    assert [slimming.accuracy.mean, slimming.accuracy.deviation] == pytest.approx([0.8968, 0.0038])
    assert {point.method for point in papers if point.is_on_line} == {"dense", "strucspars"}


def test_the_papers_ablations_are_no_points_of_its_compression(template: RunData) -> None:
    points = points_of(experiments([finished(template, "imagenet-resnet50-65", 0.75)]))
    papers = [point for point in points if not point.is_ours and point.method == "strucspars"]
    assert [point.label for point in papers] == ["35%", "65%", "85%"]


def test_runs_on_imagenet_are_shown_beside_the_papers_baselines(template: RunData) -> None:
    points = points_of(experiments([finished(template, "imagenet-resnet50-65", 0.75)]))
    others = [point for point in points if point.method == "other methods"]
    assert len(others) == sum(each.network == "imagenet-resnet50" for each in OTHER_METHODS) > 0
    fpgm = next(point for point in others if point.label == "FPGM-40%")
    assert fpgm.costs == pytest.approx({"paper_flops": 1.93e9})
    nisp = next(point for point in others if point.label == "NISP-A")
    assert nisp.costs == pytest.approx({"params": 18.6e6, "paper_flops": 2.97e9})
    assert nisp.accuracy.mean == pytest.approx(0.7275)


def test_axes_are_the_papers_where_its_points_are(template: RunData) -> None:
    assert plotted_costs(points_of(experiments([finished(template, "demo", 0.9)]))) == ["params", "macs"]
    papers = points_of(experiments([finished(template, "cifar10-resnet20-40", 0.9)]))
    assert plotted_costs(papers) == ["params", "paper_flops"]


def test_the_drawn_marks_are_the_points(template: RunData) -> None:
    points = points_of(experiments([finished(template, "demo", 0.9), finished(template, "demo-dense", 0.95)]))
    axis = trade_off_figure(points, data="digits").figure.axes[0]
    marks = {
        (float(np.asarray(line.get_xdata())[0]), float(np.asarray(line.get_ydata())[0]))
        for line in axis.lines
        if line.get_marker() in ("o", "s")
    }
    assert marks == {(130_394.0, 90.0), (219_482.0, 95.0)}


def test_bars_are_one_deviation_in_percent_and_the_papers_marks_are_hollow(template: RunData) -> None:
    runs = [finished(template, "cifar10-resnet20-40", top1, seed=seed) for seed, top1 in enumerate((0.90, 0.92))]
    ours, *papers = points_of(experiments(runs))
    axis = trade_off_figure([ours, *papers], data="any").figure.axes[0]
    drawn = {
        tuple(np.asarray(each.lines[0].get_xydata())[0].tolist()): each.lines
        for each in axis.containers
        if isinstance(each, ErrorbarContainer)
    }
    for point in (ours, *papers):
        mark, _, (bar,) = drawn[point.costs["params"], 100 * point.accuracy.mean]
        assert point.accuracy.deviation is not None
        low, high = np.asarray(bar.get_segments()[0])[:, 1]
        assert high - low == pytest.approx(2 * 100 * point.accuracy.deviation)
        assert (mark.get_markerfacecolor() == "none") == (not point.is_ours)


def test_lines_go_through_the_points_that_are_on_one_in_the_order_of_their_cost(template: RunData) -> None:
    runs = [
        finished(template, "cifar10-resnet20-40", 0.91),
        finished(template, "cifar10-resnet20-40-distilled", 0.92),
        finished(template, "cifar10-resnet20-dense", 0.915),
    ]
    points = points_of(experiments(runs))
    axis = trade_off_figure(points, data="any").figure.axes[0]
    for is_ours, style in ((True, "-"), (False, ":")):
        path = sorted(
            [point.costs["params"], 100 * point.accuracy.mean]
            for point in points
            if point.is_ours == is_ours and point.method in ("dense", "strucspars") and point.label != "distilled"
        )
        drawn = [np.asarray(line.get_xydata()).tolist() for line in axis.lines if line.get_linestyle() == style]
        assert path in drawn


def _labels(points: Sequence[Point]) -> list[str]:
    axis = trade_off_figure(points, data="any").figure.axes[0]
    return sorted(child.get_text() for child in axis.get_children() if isinstance(child, Annotation))


def test_labels_are_those_of_the_points_and_the_papers_only_where_they_are_few(template: RunData) -> None:
    points = points_of(experiments([finished(template, "cifar10-resnet20-40", 0.9)]))
    papers = [point for point in points if not point.is_ours]
    assert _labels(points) == sorted(["40%", *(point.label for point in papers if point.label)])
    assert _labels([*points, *papers * MOST_LABELS]) == ["40%"]


def test_labels_have_the_colour_of_their_network(template: RunData) -> None:
    runs = [finished(template, "cifar10-resnet20-40", 0.9), finished(template, "cifar10-resnet56-50", 0.93)]
    axis = trade_off_figure(points_of(experiments(runs)), data="any").figure.axes[0]
    colours = {child.get_text(): child.get_color() for child in axis.get_children() if isinstance(child, Annotation)}
    assert (colours["20%"], colours["50%"]) == PALETTE[:2]


def test_networks_stand_in_the_legend_by_size_whatever_their_names_and_order(template: RunData) -> None:
    names = ("cifar10-resnet110-60", "cifar10-resnet20-40", "cifar10-resnet56-50")
    points = points_of(experiments([finished(template, name, 0.9) for name in names]))
    (legend,) = trade_off_figure(points, data="any").figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[:3] == ["cifar10-resnet20", "cifar10-resnet56", "cifar10-resnet110"]


def test_costs_that_are_far_apart_have_a_logarithmic_axis(template: RunData) -> None:
    small, large = finished(template, "cifar10-resnet20-40", 0.9), finished(template, "cifar10-resnet110-60", 0.94)
    scales = [
        trade_off_figure(points_of(experiments(runs)), data="any").figure.axes[0].get_xscale()
        for runs in ([small], [small, large])
    ]
    assert scales == ["linear", "log"]


def test_the_caption_says_what_the_papers_percentages_of_slimming_are(template: RunData) -> None:
    papers = points_of(experiments([finished(template, "cifar10-resnet20-40", 0.9)]))
    ours = points_of(experiments([finished(template, "demo", 0.9)]))
    assert "slimming are of channels" in trade_off_figure(papers, data="any").caption
    assert "slimming" not in trade_off_figure(ours, data="any").caption


def test_every_data_set_has_a_figure_of_its_own(template: RunData) -> None:
    runs = [finished(template, "demo", 0.9), finished(template, "cifar10-resnet20-40", 0.9)]
    figures = comparison_contents(runs).figures
    assert [figure.name for figure in figures] == ["trade-off-digits", "trade-off-cifar10"]
    assert "demo" not in figures[1].alt
    assert ["the paper's numbers" in figure.caption for figure in figures] == [False, True]
    assert "90.00% (1 run) with 130,394 parameters" in figures[1].alt


def bench_row(*, form: str, ms: float, runtime: str = "onnxruntime", batch: int = 1, threads: int = 1) -> BenchRow:
    size = RowSize(params=1, macs=1, removed_conv_fraction=0.5, operation_ratio=2.0)
    timing = RowTiming(
        ms=ms,
        ms_low=ms,
        ms_high=ms,
        frames_per_second=1000 / ms,
        rounds=1,
        calls=1,
        speedup=Ratio(median=1.5, low=1.4, high=1.6),
        speedup_over_best=None,
    )
    return BenchRow(
        network="run",
        image_shape=(3, 32, 32),
        rate=None,
        form=form,  # type: ignore[arg-type]  # the tests give valid forms
        runtime=runtime,
        batch=batch,
        images_per_call=batch,
        threads=threads,
        size=size,
        difference=0.0,
        error="",
        timing=timing,
    )


def benched(run: RunData, *rows: BenchRow, hardware: str = "a processor") -> RunData:
    report = BenchReport(command="", commit=None, hardware={"cpu": hardware}, versions={}, settings={}, rows=rows)
    return replace(run, bench=report)


def test_latency_is_of_the_runs_own_network_in_the_fastest_runtime_at_the_smallest_batch(template: RunData) -> None:
    run = benched(
        finished(template, "demo", 0.9),
        bench_row(form="dense", ms=1.0),
        bench_row(form="compressed", ms=5.0),
        bench_row(form="compressed", ms=4.0, runtime="openvino"),
        bench_row(form="compressed", ms=2.0, batch=16),
    )
    measured = fastest(run)
    assert measured is not None
    row, timing = measured
    assert (timing.ms, row.runtime, row.batch) == (4.0, "openvino", 1)
    notes = {headline.label: headline for headline in headlines(run)}
    assert notes["latency"].value == "4 ms"
    assert notes["latency"].note == "1.50 x as fast as dense; openvino, batch 1, 1 thread"
    assert "latency in int8" not in notes


def test_latency_in_int8_stands_beside_that_in_float32(template: RunData) -> None:
    int8 = bench_row(form="compressed", ms=0.5, runtime="openvino-int8")
    assert int8.timing is not None
    over = replace(int8.timing, speedup_over_float32=Ratio(median=6.0, low=5.0, high=7.0))
    run = benched(finished(template, "demo", 0.9), bench_row(form="compressed", ms=4.0), replace(int8, timing=over))
    notes = {headline.label: headline for headline in headlines(run)}
    assert (notes["latency"].value, notes["latency in int8"].value) == ("4 ms", "0.5 ms")
    assert notes["latency in int8"].note == (
        "1.50 x as fast as dense; 6.00 x as fast as dense in float32; openvino-int8, batch 1, 1 thread"
    )


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({"device": "a GPU", "cpu": "a CPU"}, ", on a GPU"),
        ({"device": None, "cpu": "a CPU", "earlier": [{"device": "a GPU"}, {"cpu": "a CPU"}]}, ", on a GPU and a CPU"),
        ({"device": 3}, ""),
    ],
)
def test_the_time_is_that_on_all_devices_of_a_run(template: RunData, environment: dict[str, Any], where: str) -> None:
    run = replace(finished(template, "demo", 0.9), environment=environment)
    (note,) = (headline.note for headline in headlines(run) if headline.label == "time")
    assert note.partition(", on ")[1:] == where.partition(", on ")[1:]


def test_latency_is_of_the_fewest_threads(template: RunData) -> None:
    rows = bench_row(form="compressed", ms=5.0), bench_row(form="compressed", ms=2.0, threads=4)
    measured = fastest(benched(finished(template, "demo", 0.9), *rows))
    assert measured is not None
    assert (measured[1].ms, measured[0].threads) == (5.0, 1)


def test_a_dense_network_is_not_faster_than_itself(template: RunData) -> None:
    run = benched(finished(template, "demo-dense", 0.9), bench_row(form="dense", ms=7.0))
    (note,) = (headline.note for headline in headlines(run) if headline.label == "latency")
    assert note == "onnxruntime, batch 1, 1 thread"


def test_latencies_of_other_hardware_are_not_plotted(template: RunData) -> None:
    runs = [
        benched(finished(template, "demo", 0.9), bench_row(form="compressed", ms=5.0)),
        benched(finished(template, "demo-dense", 0.9), bench_row(form="dense", ms=7.0)),
        benched(
            finished(template, "demo", 0.9, "sparsify.target=0.3"),
            bench_row(form="compressed", ms=6.0),
            hardware="another one",
        ),
    ]
    points = points_of(experiments(runs), comparable_latencies(runs)[0])
    assert [point.costs.get("latency_ms") for point in points] == [5.0, 7.0, None]
    assert plotted_costs(points) == ["params", "macs", "latency_ms"]
    (figure,) = comparison_contents(runs).figures
    assert "batch 1, 1 thread" in figure.caption


@pytest.mark.parametrize("condition", ["batch", "threads"])
def test_latencies_of_another_batch_or_more_threads_are_not_plotted(template: RunData, condition: str) -> None:
    changed: dict[str, Any] = {condition: 64}
    other = replace(bench_row(form="dense", ms=300.0), **changed)
    runs = [
        benched(finished(template, "demo", 0.9), bench_row(form="compressed", ms=5.0)),
        benched(finished(template, "demo-dense", 0.9), other),
    ]
    points = points_of(experiments(runs), comparable_latencies(runs)[0])
    assert [point.costs.get("latency_ms") for point in points] == [5.0, None]


def test_a_point_has_the_mean_latency_of_its_runs(template: RunData) -> None:
    runs = [
        benched(finished(template, "demo", 0.9, seed=seed), bench_row(form="compressed", ms=5.0 + seed))
        for seed in (0, 1)
    ]
    (point,) = points_of(experiments(runs), comparable_latencies(runs)[0])
    assert point.costs["latency_ms"] == 5.5


def test_a_point_has_the_mean_cost_of_its_runs(template: RunData) -> None:
    runs = [finished(template, "demo", 0.9, seed=seed) for seed in (0, 1)]
    assert runs[1].summary is not None
    other = replace(runs[1].summary, params=BeforeAfter(219_482, 120_394))
    (point,) = points_of(experiments([runs[0], replace(runs[1], summary=other)]))
    assert point.costs["params"] == (130_394 + 120_394) / 2


def test_no_axis_of_accuracies_goes_far_beyond_a_hundred_percent(template: RunData) -> None:
    points = points_of(experiments([finished(template, "demo", 1.0), finished(template, "demo-dense", 1.0)]))
    for axis in trade_off_figure(points, data="any").figure.axes:
        assert 100 < axis.get_ylim()[1] < 101
