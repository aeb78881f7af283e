"""Commands that cannot begin leave the disk as it was."""

from pathlib import Path
from typing import Any

import pytest

REFUSED = {
    "run, recipe": ("run", "no-such-recipe"),
    "run, data": ("run", "cifar10-resnet20-dense"),
    "run, teacher": ("run", "demo", "finetune.teacher=nowhere"),
    "run, network": ("run", "demo", "model.name=no-such-network"),
    "run, weights": ("run", "demo", "model.weights=nowhere.pt", "--out", "deep/run"),
    "run, seeds": ("run", "demo", "finetune.teacher=nowhere", "--seeds", "0,1", "--jobs", "2"),
    "demo": ("demo", "model.name=no-such-network"),
    "reproduce": ("reproduce", "table1", "--rows", "cifar10-resnet20-40"),
    "reproduce, ablation": ("reproduce", "table3", "--rows", "cifar10-resnet56-60-random"),
    "compress, checkpoint": ("compress", "nowhere.pt", "--target", "0.3", "--run", "deep/run", "--model", "resnet18"),
    "compress, network": ("compress", "DEFAULT", "--target", "0.3", "--run", "deep/run", "--model", "nothing"),
    "report": ("report", "nowhere", "--out", "deep/report"),
    "bench": ("bench", "no-such-network", "--out", "bench.json", "--seconds", "1"),
    "export": ("export", "nowhere.pt", "--model", "resnet18", "--format", "onnx"),
}


@pytest.mark.parametrize("cause", REFUSED)
def test_a_refused_command_leaves_nothing(call: Any, cause: str) -> None:
    before = [path for path in Path().rglob("*") if "__pycache__" not in path.parts]
    said = call(*REFUSED[cause])
    assert said.status in (1, 2)
    assert said.err.splitlines()[-1].startswith("error: ")
    assert [path for path in Path().rglob("*") if "__pycache__" not in path.parts] == before
