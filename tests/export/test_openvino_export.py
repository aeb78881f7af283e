"""OpenVINO gets the order of channels wrong in one case; our files avoid it, and are checked in any case."""

import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import strucspars as ss
from strucspars.export import openvino as openvino_export
from strucspars.export.checked import EXPORTERS, ExportMismatch
from strucspars.export.openvino import count_axes_from_the_end_

Shuffled = Callable[..., ss.ShuffledGroupConv2d]
CHANNELS = 8
IMAGES = torch.randn(2, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(1))
# No order that is its own inverse: that would hide the error.
ORDER = np.roll(np.arange(CHANNELS), 3)
WEIGHT = np.random.default_rng(0).standard_normal((4, CHANNELS, 1, 1)).astype(np.float32)


def gather_then_convolution(axis: int) -> onnx.ModelProto:
    """A shuffle, a ReLU and a dense convolution, as plain as can be."""
    nodes = [
        helper.make_node("Gather", ["images", "order"], ["shuffled"], axis=axis),
        helper.make_node("Relu", ["shuffled"], ["positive"]),
        helper.make_node("Conv", ["positive", "weight"], ["output"]),
    ]
    inputs = [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ("batch", CHANNELS, 8, 8))]
    outputs = [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, ("batch", 4, 8, 8))]
    constants = [numpy_helper.from_array(ORDER, "order"), numpy_helper.from_array(WEIGHT, "weight")]
    graph = helper.make_graph(nodes, "shuffle", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def is_right(model: onnx.ModelProto, path: Path) -> bool:
    openvino_export.write_openvino(model, path)
    (output,) = EXPORTERS.find("openvino").load(path)((IMAGES,))
    positive = torch.relu(IMAGES[:, torch.from_numpy(ORDER)])
    return torch.allclose(output, nn.functional.conv2d(positive, torch.from_numpy(WEIGHT)), rtol=1e-4, atol=1e-4)


# Strict: once this passes, `count_axes_from_the_end_` has nothing left to do.
@pytest.mark.xfail(reason="OpenVINO 2026.4 applies the inverse order")
def test_openvino_itself_moves_a_gather_into_a_convolution_rightly(tmp_path: Path) -> None:
    assert is_right(gather_then_convolution(axis=1), tmp_path / "plain.xml")


def test_an_axis_that_counts_from_the_end_is_understood(tmp_path: Path) -> None:
    model = gather_then_convolution(axis=1)
    count_axes_from_the_end_(model.graph)
    assert model.graph.node[0].attribute[0].i == -3
    assert is_right(model, tmp_path / "counted.xml")


def test_other_axes_and_unknown_ranks_stay() -> None:
    model = gather_then_convolution(axis=2)
    count_axes_from_the_end_(model.graph)
    assert model.graph.node[0].attribute[0].i == 2
    model = gather_then_convolution(axis=1)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    count_axes_from_the_end_(model.graph)
    assert model.graph.node[0].attribute[0].i == 1


class PinnedBeforeDense(nn.Module):
    """A shuffle that folding cannot move into the dense convolution: the network reads its result in natural order."""

    def __init__(self, shuffled: Shuffled) -> None:
        super().__init__()
        self.grouped, self.dense = shuffled(), nn.Conv2d(CHANNELS, 4, 1)
        self.register_buffer("order", torch.from_numpy(ORDER))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.dense(torch.relu(self.grouped(images).index_select(1, self.get_buffer("order"))))
        return features


def test_a_shuffle_before_a_dense_convolution_is_exported_rightly(shuffled: Shuffled, tmp_path: Path) -> None:
    model = PinnedBeforeDense(shuffled).eval()
    report = ss.export(model, tmp_path / "network.xml", example_inputs=IMAGES, format="openvino", widen_groups_below=1)
    assert report.num_gathers == 2
    assert re.fullmatch(r"OpenVINO 20[\d.]+", report.runtime)
    (output,) = EXPORTERS.find("openvino").load(tmp_path / "network.xml")((IMAGES,))
    torch.testing.assert_close(output, model(IMAGES).detach(), rtol=1e-4, atol=1e-5)


def test_a_wrong_result_of_openvino_leaves_the_former_files(
    shuffled: Shuffled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PinnedBeforeDense(shuffled)
    path = tmp_path / "network.xml"
    for name in ("network.xml", "network.bin"):
        (tmp_path / name).write_text("former")

    def spoil(graph: onnx.GraphProto) -> None:
        weight = next(tensor for tensor in graph.initializer if tuple(tensor.dims) == (4, CHANNELS, 1, 1))
        weight.CopyFrom(numpy_helper.from_array(np.roll(numpy_helper.to_array(weight), 1, axis=1), weight.name))

    monkeypatch.setattr(openvino_export, "count_axes_from_the_end_", spoil)
    with pytest.raises(ExportMismatch, match=r"OpenVINO 20.* at batch size 2: output 0 is off by"):
        ss.export(model, path, example_inputs=IMAGES, format="openvino")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "network.xml": "former",
        "network.bin": "former",
    }


def test_the_xml_tells_the_names_and_the_version(shuffled: Shuffled, tmp_path: Path) -> None:
    path = tmp_path / "network.xml"
    report = ss.export(
        shuffled(), path, example_inputs=IMAGES, format="openvino", input_names=["images"], output_names=["features"]
    )
    # Two channels a group: run as one group, which needs no shuffle.
    assert report.num_gathers == 0
    text = path.read_text()
    assert 'names="images"' in text
    assert 'names="features' in text
    assert f'<strucspars.version value="{ss.__version__}"' in text
    assert {file.name for file in tmp_path.iterdir()} == {"network.xml", "network.bin"}
    assert str(Path(torch.__file__).parent) not in text


def test_what_openvino_cannot_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = gather_then_convolution(axis=1)
    model.graph.node[1].op_type = "NoSuchOperation"
    said = r"OpenVINO cannot read the network: .*NoSuchOperation.*; try another format$"
    with pytest.raises(ValueError, match=said) as refusal:
        openvino_export.write_openvino(model, tmp_path / "network.xml")
    assert not list(tmp_path.iterdir())
    assert ".cpp" not in str(refusal.value)  # the place in OpenVINO's source


def test_a_foreign_file_of_the_weights_name_is_refused(shuffled: Shuffled, tmp_path: Path) -> None:
    (tmp_path / "network.bin").write_text("foreign")
    (tmp_path / "link.xml").symlink_to("network.xml")
    with pytest.raises(FileExistsError, match=r"network\.bin .* belongs to something else; move it away"):
        ss.export(shuffled(), tmp_path / "link.xml", example_inputs=IMAGES, format="openvino")
    assert {file.name for file in tmp_path.iterdir()} == {"network.bin", "link.xml"}
    assert (tmp_path / "network.bin").read_text() == "foreign"


def test_a_file_that_does_not_fit_on_the_disk_is_named_with_the_cause(
    shuffled: Shuffled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openvino

    save = openvino.save_model
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_with_limit(*arguments: Any, **options: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        save(*arguments, **options)

    monkeypatch.setattr(openvino, "save_model", save_with_limit)
    try:
        with pytest.raises(OSError, match=r"cannot write .*network\.xml: File too large; raise the limit") as caught:
            ss.export(shuffled(), tmp_path / "network.xml", example_inputs=IMAGES, format="openvino")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "iostream" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_of_unknown_cause_is_an_os_error(
    shuffled: Shuffled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("cannot write\nat all")

    monkeypatch.setattr("openvino.save_model", fail)
    with pytest.raises(OSError, match=r"OpenVINO cannot write network\.xml: cannot write; choose another folder"):
        ss.export(shuffled(), tmp_path / "network.xml", example_inputs=IMAGES, format="openvino")
    assert list(tmp_path.iterdir()) == []


def test_openvino_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ImportError, match=r"pip install 'strucspars\[openvino\]'"):
        ss.export(nn.Conv2d(8, 8, 1), tmp_path / "network.xml", example_inputs=IMAGES, format="openvino")


def test_what_openvino_cannot_compile_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "network.xml").write_text("no network")
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        EXPORTERS.find("openvino").load(tmp_path / "network.xml")
