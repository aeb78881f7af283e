"""Int8 files: they run in int8, agree with the float32 file, and keep the layers that hurt in float32."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import openvino
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import strucspars as ss
from strucspars.export import int8
from strucspars.export.checked import find_exporter
from strucspars.export.int8 import Int8TooInaccurate

SHAPE = (3, 16, 16)
EXAMPLE = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1))
FORMATS = {"onnx": "small.onnx", "openvino": "small.xml"}


def batches(count: int = 60, shape: tuple[int, ...] = SHAPE) -> list[torch.Tensor]:
    return list(torch.split(torch.randn(count, *shape, generator=torch.Generator().manual_seed(2)), 16))


class Bottleneck(nn.Module):
    """A residual stream with a 3x3 convolution between two 1x1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 32, 1)
        self.wide = nn.Conv2d(32, 32, 3, padding=1)
        self.last = nn.Conv2d(32, 64, 1)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.wide(torch.relu(self.first(stream))))
        return torch.relu(stream + self.last(inner))


def compressed() -> nn.Module:
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
    model = nn.Sequential(*stem, Bottleneck(), Bottleneck(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    config = ss.SparsifyConfig(target=0.5, min_channels_per_group=8)
    return ss.convert_(model, ss.one_shot_plan(model, config)).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return compressed()


@pytest.mark.parametrize("format", FORMATS)
def test_an_int8_file_is_smaller_and_nearly_the_network(model: nn.Module, tmp_path: Path, format: str) -> None:
    path = tmp_path / FORMATS[format]
    report = ss.export(model, path, example_inputs=EXAMPLE, format=format, quantize=batches())
    found = report.int8
    assert found is not None
    assert found.images == 12  # every fifth of 60
    assert found.agreement is not None
    assert found.agreement >= 0.9
    assert 0 < found.output_error < 0.1
    assert (found.top1, found.drop, found.float32_layers) == (None, None, ())
    # OpenVINO's text of a small network is longer than its weights.
    assert report.nbytes < 0.5 * found.float32_nbytes or format == "openvino"
    assert "same top class in" in str(report)
    (scores,) = find_exporter(format).load(path)((EXAMPLE,))
    expected = model(EXAMPLE).detach()
    assert (scores - expected).norm() < 0.1 * expected.norm()


def test_onnx_runtime_runs_all_but_the_ends_in_8_bits(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    report = ss.export(model, path, example_inputs=EXAMPLE, quantize=batches(), widen_groups_below=1)
    assert report.num_gathers > 0
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimised.onnx"), 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    operations = Counter(node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node)
    assert operations["QLinearConv"] == 7
    assert operations["QLinearAdd"] == 2
    assert operations["Gather"] == report.num_gathers
    assert not {"Conv", "Relu", "Add"} & operations.keys()
    # Of the image, and before the linear layer.
    assert operations["QuantizeLinear"] <= 2


def test_openvino_runs_grouped_3x3_convolutions_in_8_bits(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "small.xml"
    ss.export(model, path, example_inputs=EXAMPLE, format="openvino", quantize=batches())
    compiled = openvino.Core().compile_model(openvino.Core().read_model(path), "CPU")
    layers = [operation.get_rt_info() for operation in compiled.get_runtime_model().get_ops()]
    primitives = [str(each["primitiveType"].value) for each in layers if "Conv" in str(each["layerType"].value)]
    convolutions = [primitive for primitive in primitives if "conv" in primitive or "gemm" in primitive]
    assert convolutions
    assert all(primitive.endswith("_I8") for primitive in convolutions), convolutions


class Labelled:
    """Pairs whose labels are what the network says, but for one image in five."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.images = torch.cat(batches(count))
        with torch.no_grad():
            self.labels = model(self.images).argmax(1)
        self.labels[::5] = (self.labels[::5] + 1) % 10

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(list(zip(torch.split(self.images, 20), torch.split(self.labels, 20), strict=True)))


def test_labelled_images_measure_the_accuracy_of_both_files(model: nn.Module, tmp_path: Path) -> None:
    options = ss.Int8(batches(), labelled=Labelled(model, 50), max_drop=10.0)
    found = ss.export(model, tmp_path / "small.onnx", example_inputs=EXAMPLE, quantize=options).int8
    assert found is not None
    assert (found.images, found.float32_top1) == (50, 0.8)
    assert found.top1 is not None
    assert found.drop is not None
    assert found.drop == pytest.approx(100 * (0.8 - found.top1))
    assert f"top-1 {100 * found.top1:.2f} %, float32 80.00 %" in str(found)


class Uneven(nn.Module):
    """Between `before` and `after`, one channel is a thousand times larger than the rest, and hardly looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.before = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 8, 1)
        self.after, self.wide = nn.Conv2d(8, 32, 1), nn.Conv2d(32, 64, 3)
        self.last = nn.Linear(64, 10)
        with torch.no_grad():
            self.before.weight[0] *= 1000
            self.after.weight[:, 0] /= 1000

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.wide(torch.relu(self.after(self.before(torch.relu(self.stem(images)))))))
        scores: torch.Tensor = self.last(features.mean((2, 3)))
        return scores


def uneven() -> nn.Module:
    torch.manual_seed(0)
    return Uneven().eval()


def test_layers_that_hurt_most_stay_in_float32(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    options = ss.Int8(batches(), min_agreement=0.0, max_output_error=0.05)
    loose = ss.export(
        uneven(), path, example_inputs=EXAMPLE, quantize=ss.Int8(batches(), min_agreement=0.0, max_output_error=1.0)
    ).int8
    found = ss.export(uneven(), path, example_inputs=EXAMPLE, quantize=options).int8
    assert loose is not None
    assert found is not None
    assert loose.output_error > 0.05 >= found.output_error
    assert set(found.float32_layers) <= {"before", "after"}
    assert found.float32_layers
    fixed = ss.export(uneven(), path, example_inputs=EXAMPLE, quantize=options, dynamic_batch=False).int8
    assert fixed is not None
    # Ranges differ a little, and so may the order.
    assert set(fixed.float32_layers) == set(found.float32_layers)
    assert 0 < found.float32_macs_fraction <= 0.2
    assert f"left in float32 ({100 * found.float32_macs_fraction:.1f} % of the MACs): " in str(found)


def test_an_impossible_limit_says_what_was_reached_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    path.write_bytes(b"old")
    options = ss.Int8(batches(), max_output_error=0.0)
    with pytest.raises(Int8TooInaccurate, match=r"outputs are off by 0\.\d+, max_output_error=0, also with") as error:
        ss.export(uneven(), path, example_inputs=EXAMPLE, quantize=options)
    assert "the best that was reached: same top class in " in str(error.value)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


class Logarithm(nn.Module):
    """Not a number for dark images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.conv(torch.log(images.mean((2, 3), keepdim=True) + 4 + images * 0)).mean((2, 3))
        return scores


@pytest.mark.parametrize(
    ("quantize", "message"),
    [
        ([], "got 0 images to calibrate with; give at least 32"),
        (batches(31), "got 31 images"),
        (batches(40, (3, 8, 8)), r"images of shape \(3, 16, 16\), those to calibrate or check with are \(3, 8, 8\)"),
        ([torch.full((40, *SHAPE), torch.nan)], "an image holds NaN"),
        (torch.zeros(40, *SHAPE), "must be batches of images"),
        ("photos", "must be batches of images"),
        (7, "must be batches of images"),
        ([["photo"]], "are str"),
        (ss.Int8(batches(), labelled=[]), "no images to check with"),
    ],
)
def test_bad_calibration_data_are_refused(model: nn.Module, tmp_path: Path, quantize: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ss.export(model, tmp_path / "small.onnx", example_inputs=EXAMPLE, quantize=quantize)
    assert not list(tmp_path.iterdir())


def test_activations_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    dark = [torch.full((40, *SHAPE), -9.0)]
    with pytest.raises(ValueError, match="is NaN or infinite for the images to calibrate with"):
        ss.export(Logarithm(), tmp_path / "small.onnx", example_inputs=EXAMPLE, quantize=dark)


def test_options_out_of_range_are_refused(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read several times; give a list or a loader"):
        ss.Int8(batches(), labelled=iter([(EXAMPLE, torch.zeros(2))]))
    with pytest.raises(ValueError, match="min_agreement must be a fraction"):
        ss.Int8(batches(), min_agreement=1.5)
    with pytest.raises(ValueError, match="the format torch cannot be quantised"):
        ss.export(model, tmp_path / "a.pt2", example_inputs=EXAMPLE, format="torch", quantize=batches())


def test_without_8_bit_instructions_weights_have_7_bits_and_a_warning_says_so(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(int8, "_processor_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with caplog.at_level(logging.WARNING, "strucspars"):
        ss.export(model, tmp_path / "small.onnx", example_inputs=EXAMPLE, quantize=batches())
    assert "no instructions for 8-bit dot products (VNNI): the int8 file works" in caplog.text
    assert largest_weight(tmp_path / "small.onnx") == 64
    ss.export(model, tmp_path / "small.onnx", example_inputs=EXAMPLE, quantize=ss.Int8(batches(), reduce_range=False))
    assert largest_weight(tmp_path / "small.onnx") == 127


def largest_weight(path: Path) -> int:
    weights = [each for each in onnx.load(path).graph.initializer if each.name.endswith("weight_quantized")]
    return max(int(abs(numpy_helper.to_array(each).astype(int)).max()) for each in weights)


def test_a_fixed_batch_and_pairs_with_labels_can_calibrate(model: nn.Module, tmp_path: Path) -> None:
    pairs = [(images, torch.zeros(len(images))) for images in batches()]
    report = ss.export(model, tmp_path / "small.onnx", example_inputs=EXAMPLE, quantize=pairs, dynamic_batch=False)
    assert report.int8 is not None
    assert report.int8.images == 12
    metadata = onnxruntime.InferenceSession(report.path).get_modelmeta().custom_metadata_map
    assert metadata["strucspars.precision"] == "int8"
    assert json.loads(metadata["strucspars.num_gathers"]) == report.num_gathers


def test_labels_need_scores_of_classes(tmp_path: Path) -> None:
    options = ss.Int8(batches(), labelled=[(EXAMPLE, torch.zeros(2))])
    with pytest.raises(ValueError, match="labelled images need a network with one output, the scores"):
        ss.export(nn.Conv2d(3, 4, 3), tmp_path / "small.onnx", example_inputs=EXAMPLE, quantize=options)
