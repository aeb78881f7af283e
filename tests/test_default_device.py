"""Where new tensors are made by default, `torch.set_default_device`, says nothing about networks that are elsewhere.

The meta device stands in for a GPU: what is made there by mistake has no values, and meets none of the network's.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from planned_networks import random_network, random_plan
from torch import nn

import strucspars as ss

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ELSEWHERE = torch.device("meta")


def converted() -> nn.Module:
    model = random_network()
    return ss.convert_(model, random_plan(model)).eval()


@pytest.mark.parametrize("change_", [ss.convert_, ss.mask_])
def test_networks_are_changed_with_their_optimizers(change_: Callable[..., nn.Module]) -> None:
    model = random_network().eval()
    plan, optimizer = random_plan(model), torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model(IMAGES).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with ELSEWHERE:
        change_(model, plan, optimizer)
        change_(model, plan)
    model(IMAGES).sum().backward()
    optimizer.step()


def test_files_are_loaded(tmp_path: Path) -> None:
    model, fresh = converted(), random_network(seed=1)
    ss.save(model, tmp_path / "small.safetensors")
    with ELSEWHERE:
        loaded = ss.load(tmp_path / "small.safetensors", fresh).eval()
    torch.testing.assert_close(loaded(IMAGES), model(IMAGES))


def test_networks_are_folded() -> None:
    model = converted()
    with ELSEWHERE:
        folded = ss.fold(model, IMAGES)
    assert not ss.fold_report(folded).untraced_reason
    torch.testing.assert_close(folded(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("format", "name"), [("onnx", "network.onnx"), ("openvino", "network.xml"), ("torch", "network.pt2")]
)
def test_networks_are_exported(format: str, name: str, tmp_path: Path) -> None:
    # Without circular padding, which OpenVINO does not read.
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    ss.convert_(model, random_plan(model))
    with ELSEWHERE:
        report = ss.export(model, tmp_path / name, example_inputs=IMAGES, format=format)
    assert report.agreement.num_outputs == 1


def test_the_state_of_a_sparsifier_has_values() -> None:
    config = ss.SparsifyConfig(target=0.3, epochs=2, lambda_warmup=0)
    model = random_network()
    with ELSEWHERE:
        sparsifier = ss.Sparsifier(model, config)
        sparsifier.end_epoch()
        again = ss.Sparsifier(model, config)
        again.load_state_dict(sparsifier.state_dict())
        assert again.plan().layers == sparsifier.plan().layers
