import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch

import strucspars as ss

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


def test_the_example_writes_a_smaller_network_that_loads(tmp_path: Path) -> None:
    file = tmp_path / "small.safetensors"
    command = [sys.executable, str(EXAMPLE), "--epochs", "2", "--target", "0.5", "--out", str(file)]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ).stdout
    rows = {line.split()[0]: line.split()[-2:] for line in printed.splitlines() if line.endswith("%")}
    names = runpy.run_path(str(EXAMPLE))
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
