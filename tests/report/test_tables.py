"""The tables and headlines of one run."""

from dataclasses import replace

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run

from strucspars.core.plan import GroupingPlan
from strucspars.cost.counting import BeforeAfter
from strucspars.report.confusion import Confusion, confusion_table
from strucspars.report.contents import Headline, headlines, run_contents
from strucspars.report.layers import layers_of
from strucspars.report.reading import RunData, read_run
from strucspars.report.tables import layer_table, run_tables, size_table, stage_table
from strucspars.train.recipe_reading import read_recipe

SHAPES = {"a.conv1": (16, 16, 1, 1), "a.conv2": (16, 16, 3, 3), "odd": (9, 8, 1, 1)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe()))
    return read_run(path)


@pytest.fixture(scope="module")
def unlike(run: RunData) -> RunData:
    """The run with numbers of which no two are alike."""
    assert run.summary is not None
    summary = replace(
        run.summary,
        params=BeforeAfter(10_000, 7_000),
        macs=BeforeAfter(50_000, 30_000),
        paper_flops=BeforeAfter(60_000, 48_000),
        target=0.25,
        removed_param_fraction=0.30,
        removed_mac_fraction=0.40,
        min_kept_norm=0.77,
        removed_before_search=0.21,
        converted_top1=0.71,
        converted_top5=0.94,
    )
    top5 = {"sparsify": 0.8, "compress": 0.7, "finetune": 0.9}
    rows = [{**row, "test_top5": top5[row["stage"]] + 0.01 * row["epoch"]} for row in run.rows]
    rows[4] |= {"before_top5": 0.88, "recalibrated_top1": 0.66}
    # The last epoch is not the best one.
    rows[-1] |= {"test_top1": 0.61, "test_top5": 0.85}
    return replace(run, summary=summary, rows=tuple(rows))


def found_headlines(run: RunData) -> dict[str, Headline]:
    return {headline.label: headline for headline in headlines(run)}


def test_the_layer_table_has_every_layer_of_the_plan(run: RunData) -> None:
    table = layer_table(run, layers_of(run))
    assert run.plan is not None
    titles = list(table.columns)
    for row, (name, layer) in zip(table.rows, run.plan.layers.items(), strict=True):
        cells = dict(zip(titles, row, strict=True))
        assert cells["layer"] == name
        assert cells["weight"] == "x".join(map(str, layer.weight_shape))
        assert (cells["group level"], cells["groups"]) == (layer.group_level, layer.num_groups)
        assert cells["params compressed"] == int(np.prod(layer.weight_shape)) // layer.num_groups
        assert cells["removed"] == pytest.approx(1 - 1 / layer.num_groups)
    assert [row[titles.index("largest")] for row in table.rows] == [16, 16, 1]
    assert [row[titles.index("churn, last epoch")] for row in table.rows] == run.dynamics[-1].churn.tolist()
    kept = [layer.kept_norm[layer.group_level - 1] for layer in layers_of(run)]
    assert [row[titles.index("kept norm")] for row in table.rows] == kept
    assert min(kept) < 1


def test_the_layers_of_a_plan_alone_have_no_kept_norm(run: RunData) -> None:
    bare = replace(run, importance={}, dynamics=())
    columns = layer_table(bare, layers_of(bare)).without_empty_columns().columns
    assert "removed" in columns
    assert not {"kept norm", "churn, last epoch"} & columns.keys()


def test_the_stage_table_tells_the_moments_in_order(run: RunData) -> None:
    rows = {row[0]: row[1] for row in stage_table(run).rows}
    assert list(rows) == [
        "first stage, best epoch (4)",
        "before compression",
        "right after compression",
        "finetuned, last epoch",
        "finetuned, best epoch (3)",
        "saved network",
    ]
    assert rows["before compression"] == 0.8
    assert rows["right after compression"] == pytest.approx(0.58)
    assert rows["finetuned, last epoch"] == pytest.approx(0.73)


def test_the_paper_stands_beside_its_own_recipes_only(run: RunData) -> None:
    (stages,) = (table for table in run_tables(run, ()) if table.name == "stages")
    assert "paper top-1" not in stages.columns
    table = stage_table(replace(run, recipe=read_recipe("imagenet-resnet50-65")))
    papers = {row[0]: row[3] for row in table.rows}
    assert papers["before compression"] == pytest.approx(0.6636)
    assert papers["finetuned, last epoch"] == pytest.approx(0.7510)
    assert table.notes[-1].startswith("The best epoch")


def test_every_moment_of_the_stage_table_has_its_own_numbers(unlike: RunData) -> None:
    table = stage_table(replace(unlike, recipe=read_recipe("imagenet-resnet50-65")))
    assert [tuple(row) for row in table.rows] == [
        ("first stage, best epoch (4)", pytest.approx(0.78), pytest.approx(0.84), None),
        ("before compression", 0.8, 0.88, pytest.approx(0.6636)),
        ("right after compression", pytest.approx(0.58), 0.7, pytest.approx(0.4278)),
        ("the same, batch norm recalibrated", 0.66, None, None),
        ("finetuned, last epoch", 0.61, 0.85, pytest.approx(0.7510)),
        ("finetuned, best epoch (2)", pytest.approx(0.68), pytest.approx(0.92), None),
        ("saved network", 0.71, 0.94, None),
    ]


def test_the_last_epoch_of_a_run_in_progress_is_that_so_far(unlike: RunData) -> None:
    begun = replace(unlike, summary=None)
    assert "finetuned, last epoch so far" in [row[0] for row in stage_table(begun).rows]
    assert found_headlines(begun)["top-1 finetuned so far"].value == "61.00%"


def test_every_row_of_the_sizes_has_its_own_numbers_and_the_papers(unlike: RunData) -> None:
    assert unlike.summary is not None
    summary = replace(unlike.summary, name="cifar10-resnet20-40")
    recipe = read_recipe("cifar10-resnet20-40", ["engine.precision=bf16"])
    table = size_table(replace(unlike, summary=summary, recipe=recipe))
    sizes: list[tuple[object, ...]] = [
        (10_000, 7_000, pytest.approx(0.3), 131_000),
        (50_000, 30_000, pytest.approx(0.4), None),
        (60_000, 48_000, pytest.approx(0.2), 25_800_000),
    ]
    assert [row[1:] for row in table.rows] == sizes
    assert [row[0] for row in table.rows[:2]] == ["parameters", "MACs"]
    assert table.notes == ("Not quite the paper's protocol: engine.precision=bf16.",)
    assert stage_table(replace(unlike, recipe=recipe)).notes[-1] == table.notes[0]


def test_sizes_of_a_dense_run_have_no_compressed_column(run: RunData) -> None:
    assert run.summary is not None
    assert list(run_tables(run, ())[0].columns) == ["size", "dense", "compressed", "removed"]
    dense = replace(run, recipe=replace(run.recipe, kind="dense"))
    assert list(run_tables(dense, ())[0].columns) == ["size", "dense"]


def test_a_run_in_progress_has_the_tables_that_it_can_have(run: RunData) -> None:
    begun = replace(run, summary=None, plan=None, rows=run.rows[:2])
    assert [table.name for table in run_tables(begun, layers_of(begun))] == ["stages", "layers"]
    assert [headline.label for headline in headlines(begun)] == ["top-1 of the first stage so far", "time"]


def test_headlines_of_a_finished_run_are_its_numbers(run: RunData) -> None:
    found = {headline.label: headline for headline in headlines(run)}
    assert run.summary is not None
    assert found["parameters"].value == f"{run.summary.params.after:,}"
    assert found["top-1 before compression"].value == "80.00%"
    assert found["top-1 right after compression"].value == "58.00%"
    assert found["top-1 finetuned"].value == "73.00%"
    assert found["target"].note.endswith("of the parameters reached")
    assert found["time"].value == "12 s"


def test_every_headline_has_its_own_numbers(unlike: RunData) -> None:
    told = replace(unlike, environment={"device": "an accelerator", "cpu": "a processor"})
    assert {label: (headline.value, headline.note) for label, headline in found_headlines(told).items()} == {
        "parameters": ("7,000", "30.00% of 10,000 removed"),
        "MACs": ("30,000", "40.00% of 50,000 removed"),
        "top-1 before compression": ("80.00%", ""),
        "top-1 right after compression": ("58.00%", ""),
        "top-1 finetuned": ("61.00%", "best epoch 68.00%, chosen on the test images"),
        "target": ("25.00%", "30.00% of the parameters reached"),
        "min_kept_norm": ("0.770", "searched; training alone would remove 21.00%"),
        "time": ("12 s", "sparsify 6.0 s, compress 1.5 s, finetune 4.5 s, on an accelerator"),
    }


def test_a_target_of_macs_is_compared_with_the_macs(unlike: RunData) -> None:
    recipe = replace(unlike.recipe, sparsify=replace(unlike.recipe.sparsify, budget="macs"))
    on_macs = replace(unlike, recipe=recipe)
    assert found_headlines(on_macs)["target"].note == "40.00% of the MACs reached"
    # Slimming has a target of its own, which is one of parameters.
    slimming = replace(on_macs, recipe=replace(recipe, kind="slimming"))
    assert found_headlines(slimming)["target"].note == "30.00% of the parameters reached"


def test_before_the_end_sizes_are_those_of_the_plan(run: RunData) -> None:
    assert run.plan is not None
    plan = GroupingPlan(
        run.plan.layers, min_kept_norm=0.8, removed_param_fraction=0.31, removed_mac_fraction=0.42, target=0.3
    )
    found = found_headlines(replace(run, summary=None, plan=plan))
    assert (found["parameters"].value, found["MACs"].value) == ("31.00% removed", "42.00% removed")


@pytest.mark.parametrize("stage", ["sparsify", "slim"])
def test_a_first_stage_has_the_accuracy_of_its_last_epoch(unlike: RunData, stage: str) -> None:
    rows = tuple({**row, "stage": stage} for row in unlike.rows[:2])
    found = found_headlines(replace(unlike, summary=None, plan=None, rows=rows))
    assert found["top-1 of the first stage so far"].value == "68.00%"


def test_a_confusion_table_is_the_matrix() -> None:
    confusion = Confusion(
        first="b.one",
        second="b.two",
        learned=np.array([[0, 1, 3, 4], [4, 3, 1, 0]]),
        shufflenet=np.full((2, 4), 2),
    )
    table = confusion_table(confusion, 1)
    assert list(table.columns)[1:] == ["G1", "G2", "G3", "G4"]
    assert table.rows == (("G1", 0, 1, 3, 4), ("G2", 4, 3, 1, 0))
    assert table.notes == ("ShuffleNet's fixed shuffle has 2 between all of them.",)


def test_names_of_figures_and_tables_are_unique(run: RunData) -> None:
    contents = run_contents(run)
    tables = [*contents.tables, *(table for figure in contents.figures for table in figure.tables)]
    for names in ([figure.name for figure in contents.figures], [table.name for table in tables]):
        assert len(names) == len(set(names))
