"""What the tests of the command line share: a tiny network, tiny recipes, and the program in this process."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

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


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Overrides that make any recipe take a second."""
    return TINY


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, trained once for all tests."""
    place = tmp_path_factory.mktemp("trained")
    (place / "tiny_networks.py").write_text(NETWORKS)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(place)
        patched.chdir(place)
        assert main(("run", "demo", *TINY, "--quiet")) == 0
    return place / "runs" / "demo"


@pytest.fixture
def finished(networks: Path, trained: Path) -> Path:
    """A copy of that folder in the working directory."""
    shutil.copytree(trained, "runs/demo")
    return Path("runs/demo")


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


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty figures: what they show is tested elsewhere, and drawing takes most of the time."""

    def savefig(figure: Figure, file: Any, *, format: str, transparent: bool = False, metadata: Any = None) -> None:
        file.write('<svg xmlns="http://www.w3.org/2000/svg"></svg>' if format == "svg" else b"")

    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.setattr(Figure, "draw_without_rendering", lambda figure: None)
