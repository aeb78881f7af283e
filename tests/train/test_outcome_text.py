"""A finished run as text."""

from dataclasses import replace
from pathlib import Path

import pytest

from strucspars.cost.counting import BeforeAfter
from strucspars.cost.text_table import duration
from strucspars.train.outcome import OPTIMISM, RunSummary, StageAccuracy, outcome_text, outcomes_text
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder

SUMMARY = RunSummary(
    name="mine",
    kind="strucspars",
    seed=3,
    model="net",
    data="digits",
    params=BeforeAfter(1000, 400),
    macs=BeforeAfter(5000, 3000),
    paper_flops=BeforeAfter(6000, 4000),
    target=0.55,
    removed_param_fraction=0.6,
    removed_mac_fraction=0.4,
    min_kept_norm=0.8125,
    removed_before_search=0.45,
    sparsified=StageAccuracy(last_top1=0.9, last_top5=0.95, best_top1=0.92, best_top5=0.96, best_epoch=7),
    before_compression_top1=0.9,
    compressed_top1=0.7,
    compressed_top5=0.8,
    recalibrated_top1=None,
    finetuned=StageAccuracy(last_top1=0.97, last_top5=0.99, best_top1=0.98, best_top5=0.995, best_epoch=4),
    converted_top1=0.9699,
    converted_top5=0.9899,
    finetune_form="grouped",
    seconds={"sparsify": 90.0, "compress": 0.5, "finetune": 3700.0},
)
DENSE = replace(
    SUMMARY,
    kind="dense",
    params=BeforeAfter(1000, 1000),
    target=None,
    min_kept_norm=None,
    removed_before_search=None,
    sparsified=None,
    before_compression_top1=None,
    compressed_top1=None,
    compressed_top5=None,
    finetune_form=None,
    seconds={"finetune": 90.0},
)
FOLDER = RunFolder("runs/mine")


def lines_of(summary: RunSummary, recipe: Recipe) -> list[str]:
    return [" ".join(line.split()) for line in outcome_text(summary, recipe, FOLDER).splitlines()]


def test_every_number_of_a_run_has_its_line() -> None:
    lines = lines_of(SUMMARY, Recipe(name="mine"))
    for line in (
        "mine, seed 3: net on digits",
        "params 1,000 400 60.00%",
        "MACs 5,000 3,000 40.00%",
        "first stage, best epoch (7) 92.00% 96.00%",
        "before compression 90.00% 95.00%",
        "after compression 70.00% 80.00%",
        "finetuned, last epoch 97.00% 99.00%",
        "finetuned, best epoch (4) 98.00% 99.50%",
        "saved network 96.99% 98.99%",
        OPTIMISM,
        "target remove 55.00% of all parameters: 60.00% reached",
        "threshold every grouped layer keeps at least 0.812 of its norm (searched)",
        "with the 0.9 of training, 45.00% would be removed",
        "time sparsify 1 min 30 s, compress 0.5 s, finetune 1 h 1 min",
        "runs/mine/model.safetensors the compressed network",
        "runs/mine/plan.json groups and channel orders of every layer",
    ):
        assert line in lines


def test_a_target_of_macs_is_compared_with_macs() -> None:
    recipe = read_recipe("demo", ["sparsify.budget=macs"])
    assert "target remove 55.00% of all MACs: 40.00% reached" in lines_of(SUMMARY, recipe)


def test_a_dense_run_tells_nothing_of_compression() -> None:
    text = outcome_text(DENSE, Recipe(name="mine", kind="dense"), FOLDER)
    assert "compress" not in text
    assert "target" not in text
    assert "trained, last epoch" in text


def test_a_recalibrated_network_has_its_line() -> None:
    lines = lines_of(replace(SUMMARY, recalibrated_top1=0.85), Recipe(name="mine"))
    assert "the same, batch norm recalibrated 85.00%" in lines


def test_a_taken_over_first_stage_has_no_accuracies_of_its_own() -> None:
    lines = lines_of(replace(SUMMARY, sparsified=None, removed_before_search=None), Recipe(name="mine"))
    assert "before compression 90.00%" in lines
    assert not any("first stage" in line for line in lines)


def test_several_runs_have_a_line_each_and_a_mean() -> None:
    other = replace(SUMMARY, seed=4, finetuned=replace(SUMMARY.finetuned, last_top1=0.95))
    text = outcomes_text({Path("runs/a"): SUMMARY, Path("runs/b"): other})
    lines = [line.split() for line in text.splitlines()]
    assert lines[2] == ["runs/a", "400", "60.00%", "90.00%", "70.00%", "97.00%", "98.00%", "96.99%"]
    assert lines[4] == ["mean", "60.00%", "90.00%", "70.00%", "96.00%", "98.00%", "96.99%"]
    assert lines[5][0] == "deviation"
    assert lines[5][4] == "1.41%"


def test_one_run_has_no_mean() -> None:
    assert "mean" not in outcomes_text({Path("runs/a"): SUMMARY})


def test_several_dense_runs_have_no_empty_columns() -> None:
    text = outcomes_text({Path("runs/a"): DENSE, Path("runs/b"): DENSE})
    assert "before" not in text
    assert "mean" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.96, "10.0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599.9, "1 h 0 min")]
)
def test_durations_do_not_overflow_their_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_number_that_one_run_alone_has_is_shown_without_a_mean() -> None:
    text = outcomes_text({Path("runs/a"): SUMMARY, Path("runs/b"): replace(SUMMARY, before_compression_top1=None)})
    lines = [line.split() for line in text.splitlines()]
    assert lines[2] == ["runs/a", "400", "60.00%", "90.00%", "70.00%", "97.00%", "98.00%", "96.99%"]
    assert lines[3] == ["runs/b", "400", "60.00%", "70.00%", "97.00%", "98.00%", "96.99%"]
    assert lines[4] == ["mean", "60.00%", "70.00%", "97.00%", "98.00%", "96.99%"]
