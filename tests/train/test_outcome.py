"""What a run came to, there and back; and what is not it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strucspars.cost.counting import BeforeAfter
from strucspars.train.epochs import Accuracy
from strucspars.train.outcome import (
    RunSummary,
    StageAccuracy,
    read_metrics,
    read_summary,
    run_summary,
    stage_accuracy,
)
from strucspars.train.recipe import Recipe
from strucspars.train.run_folder import RunFolder

ROWS: list[dict[str, Any]] = [
    {"stage": "sparsify", "epoch": 1, "test_top1": 0.6, "test_top5": 0.9, "removed_fraction": 0.1, "seconds": 2.0},
    {"stage": "sparsify", "epoch": 2, "test_top1": 0.5, "test_top5": 0.95, "removed_fraction": 0.3, "seconds": 3.0},
    {"stage": "compress", "epoch": 0, "before_top1": 0.5, "test_top1": 0.4, "test_top5": 0.7, "seconds": 0.5},
    {"stage": "finetune", "epoch": 1, "test_top1": 0.8, "test_top5": 0.97, "seconds": 4.0},
]


@pytest.fixture
def summary() -> RunSummary:
    dense, small = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
    return run_summary(
        Recipe(name="mine", seed=7),
        ROWS,
        dense=dense,
        small=small,
        example=torch.zeros(1, 4),
        converted=Accuracy(0.8, 0.97, 0.5),
        finetune_form="masked",
    )


def test_a_summary_has_the_numbers_of_its_rows_and_networks(summary: RunSummary) -> None:
    assert (summary.name, summary.seed, summary.params) == ("mine", 7, BeforeAfter(15, 12))
    assert summary.sparsified == StageAccuracy(
        last_top1=0.5, last_top5=0.95, best_top1=0.6, best_top5=0.9, best_epoch=1
    )
    assert (summary.before_compression_top1, summary.compressed_top1, summary.compressed_top5) == (0.5, 0.4, 0.7)
    assert (summary.removed_before_search, summary.recalibrated_top1) == (0.3, None)
    assert (summary.converted_top1, summary.converted_top5) == (0.8, 0.97)
    assert summary.seconds == {"sparsify": 5.0, "compress": 0.5, "finetune": 4.0}


def test_a_stage_that_did_not_run_has_no_accuracy() -> None:
    assert stage_accuracy(ROWS, "slim") is None


def test_a_summary_comes_back_from_json(summary: RunSummary) -> None:
    assert RunSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
    bare = replace(summary, sparsified=None, target=None, finetune_form=None)
    assert RunSummary.from_json(json.loads(json.dumps(bare.to_json()))) == bare


def test_a_summary_may_lack_the_top_5_of_the_saved_network(summary: RunSummary) -> None:
    values = summary.to_json()
    del values["converted_top5"]
    assert RunSummary.from_json(values) == replace(summary, converted_top5=None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seconds": 3}, "seconds: must be a mapping, got 3"),
        ({"seconds": {"train": "long"}}, "seconds.train: must be a finite number, got 'long'"),
        ({"converted_top1": "abc"}, "converted_top1: must be a finite number, got 'abc'"),
        ({"converted_top1": None}, "converted_top1: must be a finite number, got None"),
        ({"converted_top1": True}, "converted_top1: must be a finite number, got True"),
        ({"target": float("inf")}, "target: must be a finite number or null, got inf"),
        ({"target": float("nan")}, "target: must be a finite number or null, got nan"),
        ({"target": 10**400}, "target: must be a finite number or null, got 1000"),
        ({"seed": 1.5}, "seed: must be a whole number, got 1.5"),
        ({"name": None}, "name: must be text .*, got None"),
        ({"params": [1, 2]}, r"params: must be an object, got \[1, 2\]"),
        ({"params": {"before": 3}}, "params.after: is missing"),
        ({"params": {"before": 3, "after": "x"}}, "params.after: must be a whole number, got 'x'"),
        ({"finetuned": None}, "finetuned: must be an object, got None"),
        ({"sparsified": {"last_top1": 0.5}}, "sparsified.last_top5: is missing"),
        ({"surprise": 1}, "surprise: is not known here"),
    ],
)
def test_a_summary_with_another_type_is_refused(summary: RunSummary, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^the summary: {complaint}"):
        RunSummary.from_json(summary.to_json() | change)


def test_a_summary_is_read_from_its_folder(summary: RunSummary, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_summary(folder) is None
    folder.write_json(folder.summary_json_path, summary.to_json())
    assert read_summary(folder) == summary
    for text in ("null", "[]", '{"version": 2}'):
        folder.summary_json_path.write_text(text)
        with pytest.raises(ValueError, match=r"summary\.json: (must be an object|version: must be 1)"):
            read_summary(folder)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"stage": 5}, "stage: must be text .*, got 5"),
        ({"epoch": 1.5}, "epoch: must be a whole number, got 1.5"),
        ({"test_top5": None}, "test_top5: must be a finite number, got None"),
        ({"seconds": [1]}, r"seconds: must be a finite number, got \[1\]"),
        ({"removed_fraction": "much"}, "removed_fraction: must be a finite number or null, got 'much'"),
    ],
)
def test_a_row_with_another_type_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for row in (*ROWS, ROWS[0] | change):
        folder.append_metrics(row)
    with pytest.raises(ValueError, match=f"metrics.jsonl, line 5: {complaint}"):
        read_metrics(folder)
    folder.rewind_metrics(4)
    assert read_metrics(folder) == ROWS
