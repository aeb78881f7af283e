"""Published numbers are generated from the measurements, never typed."""

import json
from pathlib import Path
from typing import Any

import compatibility
import inference_page
import pytest
import table2_recipes
from permutations import markdown, summary_table

from strucspars.bench.results import report_from_json
from strucspars.runs.folder import RunFolder
from strucspars.training.outcome import read_metrics, read_summary, stage_accuracy, stage_seconds
from strucspars.training.paper_rows import PAPER_ROWS

ROOT = Path(__file__).parent.parent


def measured(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((ROOT / "results" / f"{name}.json").read_text())
    return report


REPORT = measured("permutations")


def test_the_page_of_the_solvers_results_is_that_of_its_json() -> None:
    assert (ROOT / "results" / "permutations.md").read_text() == markdown(REPORT)


def test_the_readme_shows_the_solvers_measured_numbers() -> None:
    assert summary_table(REPORT) in (ROOT / "README.md").read_text()


def test_the_measured_solver_meets_its_goals() -> None:
    iid = REPORT["kinds"]["iid"]
    assert iid["cold"]["speedup"] >= 40
    assert iid["cold"]["gain_ratio"] >= 1.15
    for situations in REPORT["kinds"].values():
        assert situations["cold"]["mean_cost_ratio"] <= 1
        assert situations["refresh"]["speedup"] >= 50
        assert situations["refresh"]["mean_cost_ratio"] <= 1
    assert set(REPORT["planted_512x512x3x3_recovered"].values()) == {"5 of 5"}
    assert REPORT["peak_megabytes_2048x1024"] < 250


def test_the_compatibility_page_is_that_of_its_json() -> None:
    report = measured("compatibility")
    assert (ROOT / "docs" / "compatibility.md").read_text() == compatibility.markdown(report)
    assert len(report["networks"]) >= 100
    assert not [row["network"] for row in report["networks"] if compatibility.is_unexplained(row)]


def test_the_penalty_and_the_epoch_step_cost_what_they_may() -> None:
    for network, row in measured("penalty")["networks"].items():
        assert row["added_fraction"]["regularize_"] <= 0.05, network
    for network, row in measured("training_step")["networks"].items():
        assert row["throughput_ratio"]["4"] >= 1.7, network
    assert measured("epoch_step")["resnet50"]["end_epoch_seconds"]["most"] < 1


def test_the_page_of_the_imagenet_recipes_is_that_of_its_json() -> None:
    assert (ROOT / "results" / "table2_recipes.md").read_text() == table2_recipes.markdown(measured("table2_recipes"))


def test_every_recipe_of_table_2_has_run_and_has_the_papers_size() -> None:
    report = measured("table2_recipes")
    rows = {row["recipe"]: row for row in report["rows"]}
    assert {name for name, paper in PAPER_ROWS.items() if paper.table == 2} <= set(rows)
    assert report["overrides"] == list(table2_recipes.OVERRIDES)
    assert report["failures"] == {}
    for name, row in rows.items():
        dense = name.endswith("-dense")
        assert row["stages"] == (["train"] if dense else ["sparsify", "compress", "finetune"]), name
        assert (row["grouped_layers"] == 0) == dense, name
        assert (row["paper_params"], row["paper_flops"]) == (PAPER_ROWS[name].params, PAPER_ROWS[name].flops), name
        assert not table2_recipes.differs(row), name


def test_a_recipe_that_is_a_point_larger_than_the_papers_is_noticed() -> None:
    row = {"target": 0.5, "dense_params": 1000, "params": 505, "paper_params": 500.0, "flops": 7.0, "paper_flops": 9.0}
    assert not table2_recipes.differs(row)
    assert table2_recipes.differs(row | {"params": 515})
    assert table2_recipes.differs(row | {"target": None})
    assert not table2_recipes.differs(row | {"target": None, "flops": 9.01})


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "cifar10").iterdir()), ids=lambda path: path.name)
def test_the_summaries_of_recorded_runs_are_those_of_their_epochs(path: Path) -> None:
    folder = RunFolder(path)
    summary, rows = read_summary(folder), read_metrics(folder)
    assert summary is not None
    assert summary.sparsified == stage_accuracy(rows, "sparsify")
    assert summary.finetuned == stage_accuracy(rows, "train" if summary.kind == "dense" else "finetune")
    assert summary.converted_top1 == rows[-1]["test_top1"]
    assert summary.seconds == stage_seconds(rows)


def test_the_page_of_inference_is_that_of_its_measurements() -> None:
    assert inference_page.PAGE.read_text() == inference_page.page()
    report = report_from_json((inference_page.FOLDER / "resnet50.json").read_text())
    assert inference_page.goals_table(report) in (ROOT / "README.md").read_text()


def test_compressed_networks_are_as_much_faster_as_was_asked_for() -> None:
    report = report_from_json((inference_page.FOLDER / "resnet50.json").read_text())
    assert not [row.error for row in report.rows if row.error]
    reached = inference_page.best_compressed(report)
    assert {rate for rate, goal in inference_page.GOALS.items() if reached[rate] >= goal} == set(inference_page.GOALS)
