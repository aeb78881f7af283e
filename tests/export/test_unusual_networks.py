"""Files of networks that come wrapped, from other libraries, or with inputs that cannot be given."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

import strucspars as ss

Shuffled = Callable[..., ss.ShuffledGroupConv2d]
IMAGES = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(1))


class ByKeyword(nn.Module):
    def forward(self, *, image: torch.Tensor) -> torch.Tensor:
        return image + 1


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_wrapped_network_exports_with_as_many_gathers_as_its_report_says(
    wrap: Callable[[nn.Module], nn.Module], shuffled: Shuffled, tmp_path: Path
) -> None:
    model = nn.Sequential(shuffled(), nn.BatchNorm2d(8), nn.ReLU(), shuffled(), nn.Conv2d(8, 4, 1)).eval()
    path = tmp_path / "network.onnx"
    bare = ss.export_onnx(model, path, IMAGES, widen_groups_below=1).num_gathers
    report = ss.export_onnx(wrap(model), path, IMAGES, widen_groups_below=1)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert report.num_gathers == bare == kinds.count("Gather")
    assert "BatchNormalization" not in kinds


def test_a_feature_extractor_of_torchvision_exports(tmp_path: Path) -> None:
    model = create_feature_extractor(torchvision.models.resnet18(weights=None), {"layer1": "first"}).eval()
    report = ss.export_onnx(model, tmp_path / "features.onnx", torch.randn(2, 3, 32, 32))
    assert report.agreement.num_outputs == 1


def test_inputs_by_keyword_only_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'image' by keyword only.*wrap the network"):
        ss.export_onnx(ByKeyword(), tmp_path / "network.onnx", IMAGES)
    assert not list(tmp_path.iterdir())
