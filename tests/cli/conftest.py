"""What the tests of the command line share: a tiny network, tiny recipes, and the program in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from strucspars.cli.main import main

NETWORKS = """
from torch import nn


def small(num_classes: int) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    layers = [*block(3, 8), *block(8, 16), *block(16, 16)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))
"""

TINY = (
    "model.name=tiny_networks:small",
    "stage1.epochs=1",
    "stage2.epochs=1",
    "engine.device=cpu",
)


@dataclass(frozen=True)
class Said:
    """What a call of the program came to."""

    status: int
    out: str
    err: str


Call = Callable[..., Said]


@pytest.fixture
def tiny() -> tuple[str, ...]:
    """Overrides that make any recipe take a second."""
    return TINY


@pytest.fixture
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of tiny networks, on Python's path."""
    (tmp_path / "tiny_networks.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(networks: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """The program, called in this process and in an own directory."""

    def called(*arguments: str) -> Said:
        status = main(arguments)
        captured = capsys.readouterr()
        return Said(status, captured.out, captured.err)

    return called
