import runpy
import sys
from pathlib import Path

import pytest
import torch

import strucspars as ss

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


def test_the_example_writes_a_smaller_network_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.safetensors"
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--epochs", "2", "--target", "0.5", "--out", str(file)])
    names = runpy.run_path(str(EXAMPLE), run_name="__main__")
    rows = {line.split()[0]: line.split()[-2:] for line in capsys.readouterr().out.splitlines() if line.endswith("%")}
    dense = names["num_params"](names["network"]())
    model = ss.load(file, names["network"]())
    assert names["num_params"](model) <= 0.5 * dense
    assert rows["finetuned"] == [f"{names['num_params'](model):,}", f"{names['accuracy'](model):.1%}"]
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 8)


def test_the_examples_classes_can_be_told_apart() -> None:
    names = runpy.run_path(str(EXAMPLE))
    images, labels = names["stripes"](64, seed=0)
    again, _ = names["stripes"](64, seed=0)
    assert torch.equal(images, again)
    assert set(labels.tolist()) == set(range(8))
