"""The demo, shortened, and what it promises."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strucspars.cli.demo import broken_promises, demo_text
from strucspars.cost.counting import BeforeAfter
from strucspars.export.checked import Agreement, ExportReport
from strucspars.train.outcome import RunSummary, StageAccuracy
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder


def accuracy(top1: float) -> StageAccuracy:
    return StageAccuracy(last_top1=top1, last_top5=1.0, best_top1=top1, best_top5=1.0, best_epoch=1)


DENSE = RunSummary(
    name="demo-dense",
    kind="dense",
    seed=0,
    model="net",
    data="digits",
    params=BeforeAfter(1000, 1000),
    macs=BeforeAfter(5000, 5000),
    paper_flops=BeforeAfter(6000, 6000),
    target=None,
    removed_param_fraction=0.0,
    removed_mac_fraction=0.0,
    min_kept_norm=None,
    removed_before_search=None,
    sparsified=None,
    before_compression_top1=None,
    compressed_top1=None,
    compressed_top5=None,
    recalibrated_top1=None,
    finetuned=accuracy(0.98),
    converted_top1=0.98,
    finetune_form=None,
    seconds={"finetune": 60.0},
)
SMALL = replace(
    DENSE,
    name="demo",
    kind="strucspars",
    params=BeforeAfter(1000, 500),
    target=0.5,
    removed_param_fraction=0.5,
    removed_before_search=0.25,
    before_compression_top1=0.9,
    compressed_top1=0.8,
    finetuned=accuracy(0.97),
)


EXPORTED = ExportReport(
    path=Path("runs/demo/model.onnx"),
    format="onnx",
    runtime="ONNX Runtime 1",
    nbytes=1000,
    num_gathers=2,
    gathered_bytes=100,
    agreement=Agreement(batch_sizes=(2, 1), max_relative_error=2e-7, tolerance=1e-4, num_outputs=1),
)


def test_promises_that_just_hold_are_kept() -> None:
    assert broken_promises(DENSE, SMALL) == []


@pytest.mark.parametrize(
    ("small", "complaint"),
    [
        (replace(SMALL, removed_before_search=0.24), "sparse training alone removed 24.00%"),
        (replace(SMALL, removed_before_search=None), "sparse training alone removed nothing"),
        (replace(SMALL, removed_param_fraction=0.499), "only 49.90% of the parameters"),
        (replace(SMALL, finetuned=accuracy(0.969)), "1.10 points less"),
    ],
)
def test_a_promise_that_does_not_hold_is_named(small: RunSummary, complaint: str) -> None:
    (broken,) = broken_promises(DENSE, small)
    assert complaint in broken


def test_the_text_compares_and_tells_what_to_try_next() -> None:
    recipe = read_recipe("demo", ["stage1.epochs=24", "stage2.epochs=10"])
    text = demo_text(DENSE, SMALL, Path("runs/demo-dense"), Path("runs/demo"), EXPORTED, recipe)
    for part in ("dense", "compressed", "1,000", "500", "98.00%", "97.00%", "runs/demo/model.safetensors", "try next"):
        assert part in text
    assert "Both networks were trained for 34 epochs" in text
    assert "runs/demo/model.onnx  the same for ONNX Runtime 1, off by 2e-07 of the largest output" in text
    assert "24 + 10" in text


def test_both_networks_of_the_demo_are_trained_for_as_many_epochs() -> None:
    dense, small = read_recipe("demo-dense"), read_recipe("demo")
    assert dense.stage2.epochs == small.stage1.epochs + small.stage2.epochs


@pytest.mark.usefixtures("undrawn")
def test_a_demo_that_is_too_short_fails_but_shows_what_it_has(call: Any, tiny: tuple[str, ...]) -> None:
    said = call("demo", *tiny)
    assert said.status == 1
    assert said.err.splitlines()[-1].startswith("error: the demo does not keep its promises: sparse training alone")
    assert "What to try next" in said.out
    assert "Both networks were trained for 2 epochs" in said.out
    assert len(RunFolder("runs/demo-dense").metrics()) == 2
    assert Path("runs/demo/model.safetensors").is_file()
    assert Path("runs/demo/model.onnx").is_file()
    assert Path("runs/report/index.html").is_file()
    assert "runs/report/index.html  a report on what was learned" in said.out
    assert Path("runs/demo-dense/model.safetensors").is_file()
    demos = json.loads(call("demo", *tiny, "--json", "--seeds", "0,1").out)["demos"]
    assert [demo["compressed"]["folder"] for demo in demos] == ["runs/demo", "runs/demo-seed1"]
    assert all(demo["broken_promises"] for demo in demos)


@pytest.mark.parametrize("override", ["name=foo", "name =foo"])
def test_the_demo_keeps_the_names_of_its_runs(call: Any, tiny: tuple[str, ...], override: str) -> None:
    said = call("demo", *tiny, override)
    assert said.status == 2
    assert (
        said.err == f"error: {override!r}: the two runs of the demo have their own names; leave it out, or use --out\n"
    )
    assert not Path("runs").exists()
