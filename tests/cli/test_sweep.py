"""The command that compares targets."""

import json
from pathlib import Path
from typing import Any

import pytest

from strucspars.bench import deployed
from strucspars.bench.suite import TimingRules

SMALL = "tiny_networks:small"
OWN = (SMALL, "--classes", "3", "--image-shape", "3x16x16")


@pytest.fixture
def finished_dense(networks: Path, call: Any) -> None:
    """A dense run in the working directory."""
    assert call("run", "demo-dense", "model.name=" + SMALL, "stage2.epochs=1", "--quiet").status == 0


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = TimingRules(seconds=0.1, visit_seconds=0.01, min_rounds=1, max_rounds=1)
    monkeypatch.setitem(deployed.deployed_networks.__kwdefaults__ or {}, "rules", rules)


def test_a_table_compares_the_dense_network_with_every_target(call: Any) -> None:
    said = call("sweep", *OWN, "--targets", "0.2,0.4")
    assert said.status == 0
    assert [line.split()[0] for line in said.out.splitlines()[2:5]] == ["dense", "20%", "40%"]
    assert "top-1" not in said.out


def test_scripts_get_numbers_and_a_figure_is_drawn(call: Any) -> None:
    said = call("sweep", *OWN, "--targets", "0.3", "--out", "sweep.png", "--json")
    assert said.status == 0
    document = json.loads(said.out)
    assert [row["target"] for row in document["rows"]] == [None, 0.3]
    assert document["rows"][1]["removed_params"] >= 0.3
    assert Path("sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_is_compressed_with_its_own_images(call: Any, finished_dense: None) -> None:
    said = call("sweep", "runs/demo-dense", "--model", SMALL, "--targets", "0.3", "--images", "8", "--json")
    assert said.status == 0
    dense, small = json.loads(said.out)["rows"]
    assert dense["deployed"]["top1"] is not None
    assert small["predicted_divergence"] is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*OWN, "--targets", "2"), "--targets must be fractions between 0 and 1"),
        ((*OWN, "--out", "sweep.pdf"), "name a file that ends in .png or .svg"),
        ((*OWN, "--val", "photos"), "by name has random weights (give DEFAULT or a checkpoint with --model"),
        ((SMALL, "data.root=photos", *OWN[1:]), "only data.* of a run can change"),
        ((*OWN, "--levels", "best"), "levels must be one of threshold, knapsack"),
        ((*OWN, "--orders", "none"), "orders must be one of free, shared, one-shuffle"),
        ((*OWN, "--targets", "0.99"), "target 0.99 cannot be reached"),
    ],
)
def test_wrong_use_is_an_error_with_a_remedy(call: Any, arguments: tuple[str, ...], words: str) -> None:
    said = call("sweep", *arguments)
    assert said.status == 2
    assert words in " ".join(said.err.split())


def test_a_compressed_run_is_refused(call: Any, finished: Path) -> None:
    said = call("sweep", "runs/demo", "--model", SMALL)
    assert said.status == 2
    assert "this network is compressed already" in said.err
