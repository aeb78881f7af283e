"""The published numbers, and the recipes that repeat them."""

import dataclasses

import pytest

from strucspars.paper.published import PAPER_ROWS, base_row, selected_rows, table_rows
from strucspars.train.recipe_reading import read_recipe, recipe_names


@pytest.mark.parametrize(("table", "count"), [("table1", 19), ("table2", 11), ("table3", 15), ("table5", 18)])
def test_all_rows_of_a_table_have_recipes(table: str, count: int) -> None:
    rows = table_rows(table)
    assert len(rows) == len(set(rows)) == count
    assert set(rows) <= set(recipe_names())


def test_table_5_has_the_papers_numbers_where_the_paper_has_them() -> None:
    found = {name: row for name, row in PAPER_ROWS.items() if row.min_kept_norm is not None}
    assert len(found) == 8
    assert set(found) < set(table_rows("table5"))
    assert {read_recipe(name).kind for name in table_rows("table5")} == {"strucspars"}
    for row in found.values():
        assert row.min_kept_norm is not None
        assert row.before_compression is not None
        assert row.after_compression is not None
        assert 0.87 < row.min_kept_norm < 0.92
        assert row.after_compression < row.before_compression < row.top1.mean


def test_rows_are_chosen_by_name_and_pattern() -> None:
    assert selected_rows("table1", ["cifar10-resnet20-40", "*-dense"]) == [
        "cifar10-resnet20-dense",
        "cifar10-resnet20-40",
        "cifar10-resnet56-dense",
        "cifar10-resnet110-dense",
    ]
    assert len(selected_rows("table3", None)) == 5
    assert selected_rows("table2", None) == table_rows("table2")


# What a variant changes of its base, and nothing else.
CHANGES = {
    "low-rate": ("stage2.lr=0.01",),
    "distilled": ("finetune.teacher=runs/{network}-dense",),
    "modern": ("stage2.schedule=cosine", "stage2.weight_decay=5e-4"),
    "paper-solver": ("sparsify.method=paper",),
    "progressive": ("sparsify.schedule=progressive", "sparsify.controller=auto", "sparsify.lambda_step=null"),
    **{
        ablation: (f"finetune.ablation={ablation}",)
        for ablation in ("from-scratch", "shufflenet", "random", "no-shuffle")
    },
}


@pytest.mark.parametrize("name", [name for name in recipe_names() if base_row(name)])
def test_variants_change_what_they_say_and_nothing_else(name: str) -> None:
    base = str(base_row(name))
    way, network = name.removeprefix(f"{base}-"), "-".join(name.split("-")[:2])
    if way == "slimming":
        recipe, its = read_recipe(name), read_recipe(base)
        papers = read_recipe(f"{network}-slimming60")
        assert recipe == dataclasses.replace(
            papers,
            name=name,
            slimming=dataclasses.replace(papers.slimming, target=its.sparsify.target),
            stage1=dataclasses.replace(papers.stage1, epochs=its.stage1.epochs),
        )
    else:
        overrides = [change.format(network=network) for change in CHANGES[way]]
        assert read_recipe(name) == dataclasses.replace(read_recipe(base, overrides), name=name)
