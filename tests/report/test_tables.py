"""The tables and headlines of one run."""

from dataclasses import replace

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run

from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.report.contents import run_contents
from strucspars.report.figures.confusion import confusions_of
from strucspars.report.headlines import headlines
from strucspars.report.run_reading import RunData, read_run
from strucspars.report.tables import confusion_table, layer_table, run_tables, size_table, stage_table
from strucspars.training.recipe_reading import read_recipe

SHAPES = {"a.conv1": (16, 16, 1, 1), "a.conv2": (16, 16, 3, 3), "odd": (9, 8, 1, 1)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe()))
    return read_run(path)


def test_the_layer_table_has_every_layer_of_the_plan(run: RunData) -> None:
    table = layer_table(run)
    assert run.plan is not None
    titles = [column.title for column in table.columns]
    for row, (name, layer) in zip(table.rows, run.plan.layers.items(), strict=True):
        cells = dict(zip(titles, row, strict=True))
        assert cells["layer"] == name
        assert cells["weight"] == "x".join(map(str, layer.weight_shape))
        assert (cells["group level"], cells["groups"]) == (layer.group_level, layer.num_groups)
        assert cells["params compressed"] == int(np.prod(layer.weight_shape)) // layer.num_groups
        assert cells["removed"] == pytest.approx(1 - 1 / layer.num_groups)
    assert [row[titles.index("largest")] for row in table.rows] == [16, 16, 1]


def test_the_layers_of_a_plan_alone_have_no_kept_norm(run: RunData) -> None:
    table = layer_table(replace(run, importance={}, dynamics=()))
    assert (table.columns[-1].title, [row[-1] for row in table.rows]) == ("kept norm", [None] * 3)


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
    assert "paper top-1" not in [column.title for column in stage_table(run).columns]
    table = stage_table(replace(run, recipe=read_recipe("imagenet-resnet50-65")))
    papers = {row[0]: row[3] for row in table.rows}
    assert papers["before compression"] == pytest.approx(0.6636)
    assert papers["finetuned, last epoch"] == pytest.approx(0.7510)
    assert table.notes[-1].startswith("The best epoch")


def test_sizes_of_a_dense_run_have_no_compressed_column(run: RunData) -> None:
    assert run.summary is not None
    titles = [column.title for column in size_table(run).columns]
    assert titles == ["size", "dense", "compressed", "removed"]
    dense = replace(run, summary=replace(run.summary, kind="dense"))
    assert [column.title for column in size_table(dense).columns] == ["size", "dense"]


def test_a_run_in_progress_has_the_tables_that_it_can_have(run: RunData) -> None:
    begun = replace(run, summary=None, plan=None, rows=run.rows[:2], is_finished=False)
    assert [table.name for table in run_tables(begun)] == ["stages", "layers"]
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


def test_a_confusion_table_is_the_matrix(run: RunData) -> None:
    def layer(seed: int) -> LayerPlan:
        random = np.random.default_rng(seed)
        order = random.permutation(16)
        return LayerPlan(group_level=2, out_perm=order, in_perm=order[::-1], weight_shape=(16, 16, 1, 1))

    (confusion,) = confusions_of(GroupingPlan({"b.one": layer(0), "b.two": layer(1)}))
    table = confusion_table(confusion, 1)
    assert [list(row[1:]) for row in table.rows] == confusion.learned.tolist()
    assert table.notes == ("ShuffleNet's fixed shuffle has 4 between all of them.",)


def test_names_of_figures_and_tables_are_unique(run: RunData) -> None:
    contents = run_contents(run)
    for names in ([figure.name for figure in contents.figures], [table.name for table in contents.tables]):
        assert len(names) == len(set(names))
