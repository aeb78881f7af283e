"""The runner gives what the network gives, however it divides the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import strucspars as ss

Shuffled = Callable[..., ss.ShuffledGroupConv2d]

IMAGES = torch.randn(5, 8, 6, 6, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """Two inputs, one of which is no batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, images: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.layer(images) * scale[:, None, None]
        return features, features.mean((2, 3))


@pytest.fixture(scope="module")
def model(shuffled: Shuffled) -> nn.Module:
    torch.manual_seed(0)
    return Scaled(nn.Sequential(shuffled(), nn.ReLU(), shuffled())).eval()


@pytest.fixture(scope="module")
def path(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runner") / "network.onnx"
    return ss.export_onnx(model, path, (IMAGES[:2], torch.randn(8)), widen_groups_below=1).path


@pytest.mark.parametrize("images_per_call", [None, 1, 2, 5, 9])
def test_every_division_of_a_batch_gives_what_the_network_gives(
    images_per_call: int | None, model: nn.Module, path: Path
) -> None:
    scale = torch.linspace(0.5, 2, 8)
    outputs = ss.OnnxRunner(path, threads=1, images_per_call=images_per_call)(IMAGES.numpy(), scale)
    with torch.no_grad():
        expected = model(IMAGES, scale)
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(output), wanted, rtol=1e-4, atol=1e-5)


def test_an_input_that_is_no_batch_stays_whole_though_it_is_as_long_as_one(model: nn.Module, path: Path) -> None:
    images, scale = torch.cat([IMAGES, IMAGES[:3] + 1]), torch.linspace(0.5, 2, 8)
    assert len(images) == len(scale)
    outputs = ss.OnnxRunner(path, threads=1)(images.numpy(), scale.numpy())
    with torch.no_grad():
        expected = model(images, scale)
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(output), wanted, rtol=1e-4, atol=1e-5)


def test_images_go_one_by_one_only_where_gathers_remain(path: Path, tmp_path: Path) -> None:
    assert ss.OnnxRunner(path).images_per_call == 1
    report = ss.export_onnx(nn.Conv2d(8, 8, 1), tmp_path / "dense.onnx", IMAGES)
    assert ss.OnnxRunner(report.path).images_per_call is None


def test_an_image_may_use_as_many_threads_as_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = onnxruntime.InferenceSession, []

    def session(file: Path, options: Any, **others: Any) -> Any:
        seen.append(options.intra_op_num_threads)
        return real(file, options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    for threads in (1, 3, None):
        ss.OnnxRunner(path, threads=threads)
    # ONNX Runtime's zero: one per core.
    assert seen == [1, 3, 0]
    with pytest.raises(ValueError, match="threads must be a whole number from 1 on"):
        ss.OnnxRunner(path, threads=0)


def test_a_file_of_fixed_batch_is_run_at_once(shuffled: Shuffled, tmp_path: Path) -> None:
    report = ss.export_onnx(shuffled(), tmp_path / "fixed.onnx", IMAGES, dynamic_batch=False, widen_groups_below=1)
    (features,) = ss.OnnxRunner(report.path)(IMAGES)
    assert features.shape == IMAGES.shape


def test_an_empty_batch_has_empty_outputs(path: Path) -> None:
    features, _ = ss.OnnxRunner(path)(IMAGES[:0].numpy(), np.ones(8, np.float32))
    assert features.shape == (0, 8, 6, 6)


def test_what_cannot_be_run_is_said(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere\.onnx"):
        ss.OnnxRunner(tmp_path / "nowhere.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    with pytest.raises(ValueError, match=r"cannot read .*broken\.onnx"):
        ss.OnnxRunner(tmp_path / "broken.onnx")
    with pytest.raises(ValueError, match="images_per_call must be a whole number from 1 on"):
        ss.OnnxRunner(path, images_per_call=0)
    with pytest.raises(ValueError, match=r"takes 2 inputs \(images, scale\), not 1"):
        ss.OnnxRunner(path)(np.zeros((1, 8, 6, 6), np.float32))


class Mixing(nn.Module):
    """Every sample sees the mean of all."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(images)
        return features - features.mean(0, keepdim=True)


def test_samples_that_depend_on_each_other_are_computed_together(shuffled: Shuffled, tmp_path: Path) -> None:
    model = Mixing(nn.Sequential(shuffled(), nn.ReLU(), shuffled())).eval()
    report = ss.export_onnx(model, tmp_path / "mixing.onnx", IMAGES[:2], widen_groups_below=1)
    assert report.num_gathers > 0
    (features,) = ss.OnnxRunner(report.path)(IMAGES.numpy())
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(features), model(IMAGES), rtol=1e-4, atol=1e-5)
