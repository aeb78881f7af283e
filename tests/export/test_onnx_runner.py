"""The runner gives what the network gives, however it divides the batch."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import nn

import strucspars as ss
from strucspars.export.program import INDEPENDENT_KEY, inference_program

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
    return ss.export(model, path, example_inputs=(IMAGES[:2], torch.randn(8)), widen_groups_below=1).path


@pytest.fixture
def call_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples of its first input ONNX Runtime got, call by call."""
    real, sizes = onnxruntime.InferenceSession.run, []

    def noted(self: Any, names: Any, arrays: dict[str, Any]) -> Any:
        sizes.append(len(next(iter(arrays.values()))))
        return real(self, names, arrays)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", noted)
    return sizes


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


@pytest.mark.parametrize(("images_per_call", "sizes"), [(None, [1, 1, 1, 1, 1]), (2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_so_many_images_go_at_a_time_as_asked_for(
    images_per_call: int | None, sizes: list[int], path: Path, call_sizes: list[int]
) -> None:
    ss.OnnxRunner(path, threads=1, images_per_call=images_per_call)(IMAGES, torch.ones(8))
    assert call_sizes == sizes


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
    report = ss.export(nn.Conv2d(8, 8, 1), tmp_path / "dense.onnx", example_inputs=IMAGES)
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
    report = ss.export(
        shuffled(), tmp_path / "fixed.onnx", example_inputs=IMAGES, dynamic_batch=False, widen_groups_below=1
    )
    (features,) = ss.OnnxRunner(report.path)(IMAGES)
    assert features.shape == IMAGES.shape


def test_an_empty_batch_has_empty_outputs(path: Path) -> None:
    features, _ = ss.OnnxRunner(path)(IMAGES[:0].numpy(), np.ones(8, np.float32))
    assert features.shape == (0, 8, 6, 6)


def test_what_cannot_be_run_is_said(path: Path, tmp_path: Path) -> None:
    for missing in (tmp_path / "nowhere.onnx", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"no file {missing}; strucspars.export writes one"):
            ss.OnnxRunner(missing)
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
    report = ss.export(model, tmp_path / "mixing.onnx", example_inputs=IMAGES[:2], widen_groups_below=1)
    assert report.num_gathers > 0
    (features,) = ss.OnnxRunner(report.path)(IMAGES.numpy())
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(features), model(IMAGES), rtol=1e-4, atol=1e-5)


class Returning(nn.Module):
    """Puts out what a function makes of the images and a table."""

    def __init__(self, made: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.made, self.table = made, nn.Parameter(torch.ones(1, 4))

    def forward(self, images: torch.Tensor) -> Any:
        return self.made(images, self.table)


@pytest.mark.parametrize(
    ("made", "dynamic_batch", "independent"),
    [
        (lambda images, table: (images * 2, images.mean((2, 3)) + table.sum()), True, "true"),
        (lambda images, table: images * 2, False, "false"),
        (lambda images, table: (images * 2, images - images.mean(0, keepdim=True)), True, "false"),
        # Outputs that are no batch.
        (lambda images, table: (images * 2, images.mean()), True, "false"),
        (lambda images, table: (images * 2, table * 2), True, "false"),
    ],
)
def test_samples_are_independent_only_if_all_outputs_are_batches_of_theirs(
    made: Callable[[torch.Tensor, torch.Tensor], Any], dynamic_batch: bool, independent: str
) -> None:
    program = inference_program(Returning(made), IMAGES, dynamic_batch=dynamic_batch)
    assert program.metadata[INDEPENDENT_KEY] == independent


def sum_of_two_batches_and_a_number(path: Path, metadata: dict[str, str]) -> Path:
    inputs, outputs = (
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
        for shapes in ({"left": ("batch",), "right": ("batch",), "number": ()}, {"output": ("batch",)})
    )
    nodes = [
        helper.make_node("Add", ["left", "right"], ["sum"]),
        helper.make_node("Add", ["sum", "number"], ["output"]),
    ]
    graph = helper.make_graph(nodes, "sum", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


def test_batches_of_different_lengths_are_not_cut_to_the_shorter(tmp_path: Path) -> None:
    path = sum_of_two_batches_and_a_number(tmp_path / "sum.onnx", {INDEPENDENT_KEY: "true"})
    run = ss.OnnxRunner(path, threads=1, images_per_call=1)
    five, three, one = (np.ones(shape, np.float32) for shape in (5, 3, ()))
    assert run(five, five, one)[0].tolist() == [3] * 5
    with pytest.raises(ValueError, match=r"input 'right' must be float32 of shape \(5\), got float32 of shape \(3,\)"):
        run(five, three, one)


@pytest.mark.parametrize(
    ("images", "scale", "complaint"),
    [
        (
            np.zeros((1, 8, 6, 6)),
            np.ones(8, np.float32),
            "'images' must be float32 of shape (batch, 8, 6, 6), got float64",
        ),
        (np.zeros((8, 6, 6), np.float32), np.ones(8, np.float32), "'images' must be float32 of shape (batch, 8, 6, 6)"),
        (np.zeros((2, 8, 6, 5), np.float32), np.ones(8, np.float32), "got float32 of shape (2, 8, 6, 5)"),
        (
            np.zeros((2, 8, 6, 6), np.float32),
            np.ones(7, np.float32),
            "'scale' must be float32 of shape (8), got float32",
        ),
    ],
)
def test_an_input_that_does_not_fit_is_named_with_what_was_expected(
    images: Any, scale: Any, complaint: str, path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        ss.OnnxRunner(path)(images, scale)


def test_a_failure_of_the_runtime_names_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory\nin node 3")

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", fail)
    with pytest.raises(RuntimeError, match=r"ONNX Runtime failed on .*network\.onnx: out of memory$"):
        ss.OnnxRunner(path)(IMAGES, torch.ones(8))


def test_a_file_that_tells_nothing_is_run_at_once(tmp_path: Path, call_sizes: list[int]) -> None:
    path = sum_of_two_batches_and_a_number(tmp_path / "sum.onnx", {})
    assert ss.OnnxRunner(path, threads=1).images_per_call is None
    run = ss.OnnxRunner(path, threads=1, images_per_call=1)
    run(np.ones(5, np.float32), np.ones(5, np.float32), np.float32(1))
    assert call_sizes == [5]
