"""Two networks as files, side by side: what is counted, timed and scored."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.bench.deployed import SITTING, DeployedPair, deployed_pair
from strucspars.data.batches import Batch
from strucspars.nn.names import copied

QUICK = replace(SITTING, seconds=0.01, visit_seconds=0.001, min_rounds=3, max_rounds=3)
LABELS = torch.tensor([0, 1, 2, 0, 1, 0])


def images() -> torch.Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def batches() -> Iterator[Batch]:
    """Two batches; the last image only fills the second one up."""
    valid = torch.tensor([True] * 5 + [False])
    for part in (slice(0, 3), slice(3, 6)):
        yield Batch(images()[part], LABELS[part], valid[part])


@pytest.fixture(scope="module")
def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)]
    dense = nn.Sequential(*layers).eval()
    return dense, ss.convert_(copied(dense), ss.one_shot_plan(dense, target=0.3))


@pytest.fixture(scope="module")
def pair(networks: tuple[nn.Module, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> DeployedPair:
    path = tmp_path_factory.mktemp("files") / "small.onnx"
    return deployed_pair(*networks, path, image_shape=(3, 8, 8), batches=batches(), rules=QUICK)


def test_every_valid_image_is_scored_once_by_both_files(
    pair: DeployedPair, networks: tuple[nn.Module, nn.Module]
) -> None:
    assert pair.images == 5
    for found, network in zip((pair.dense, pair.compressed), networks, strict=True):
        with torch.no_grad():
            right = network(images()[:5]).argmax(1) == LABELS[:5]
        assert found.top1 == pytest.approx(right.float().mean().item())


def test_the_table_counts_what_the_file_holds(pair: DeployedPair, networks: tuple[nn.Module, nn.Module]) -> None:
    params = [sum(parameter.numel() for parameter in network.parameters()) for network in networks]
    assert [pair.dense.params, pair.compressed.params] == params
    assert pair.compressed.file_bytes == pair.path.stat().st_size
    assert pair.speedup.low <= pair.speedup.median <= pair.speedup.high
    assert [line.split("  ")[0] for line in str(pair).splitlines()[2:]] == [
        "top-1 on 5 images",
        "parameters",
        "MACs",
        "ONNX file, MB",
        "ms per image",
    ]


def test_a_dense_network_that_never_learned_the_labels_is_not_scored(
    networks: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    found = deployed_pair(
        *networks,
        tmp_path / "small.onnx",
        image_shape=(3, 8, 8),
        batches=batches(),
        is_dense_trained=False,
        rules=QUICK,
    )
    assert (found.dense.top1, found.compressed.top1 is None) == (None, False)
    assert "not trained for these" in str(found)
    assert "points" not in str(found)
