"""What an ONNX file says beside the network's function, and what becomes of it when something fails."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import nn

import strucspars as ss
from strucspars.convert.ablation import reordered_plan
from strucspars.export import onnx as onnx_export
from strucspars.export.checked import ExportMismatch
from strucspars.export.onnx import name_batch_axis_
from strucspars.export.program import Inference
from strucspars.export.storage import hash_of_model, plan_hash

Shuffled = Callable[..., ss.ShuffledGroupConv2d]
IMAGES = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(1))


class Scoring(nn.Module):
    """Names that want to be in each other's way."""

    def __init__(self, shuffled: Shuffled) -> None:
        super().__init__()
        self.add_module("größe/\N{SNOWMAN} ;'", shuffled())
        self.add_module("images", shuffled(kernel_size=1))
        self.add_module("1 + 1", nn.Linear(8, 4))

    def forward(self, images: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        first, second, last = self.children()
        scores: torch.Tensor = last(second(torch.relu(first(images))).mean((2, 3)) + offset)
        return scores


@pytest.fixture(scope="module")
def model(shuffled: Shuffled) -> nn.Module:
    torch.manual_seed(0)
    return Scoring(shuffled)


@pytest.fixture(scope="module")
def written(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    path = tmp_path_factory.mktemp("export") / "network.onnx"
    ss.export(model, path, example_inputs=(IMAGES, torch.randn(2, 8)), widen_groups_below=1)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    return onnx.load(path)


@pytest.fixture
def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU())


def named_shapes(values: Any) -> dict[str, list[str | int]]:
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim] for value in values
    }


def test_inputs_and_outputs_are_named_and_their_batch_is_free(written: onnx.ModelProto) -> None:
    onnx.checker.check_model(written, full_check=True)
    assert named_shapes(written.graph.input) == {"images": ["batch", 8, 8, 8], "offset": ["batch", 8]}
    assert named_shapes(written.graph.output) == {"output": ["batch", 4]}


def test_every_remaining_shuffle_is_one_gather(written: onnx.ModelProto) -> None:
    operations = [node.op_type for node in written.graph.node]
    # At the input, one between the two grouped layers, and at the sum with the other input.
    assert operations.count("Gather") == 3
    assert not {"GatherND", "Transpose", "GatherElements"} & set(operations)


def test_groups_of_fewer_than_16_channels_run_as_wider_ones_unless_told_otherwise(tmp_path: Path) -> None:
    narrow = ss.ShuffledGroupConv2d(64, 64, 1, groups=8)
    widths = []
    for number, width in enumerate((None, 1)):
        path = tmp_path / f"{number}.onnx"
        ss.export(narrow, path, example_inputs=torch.randn(2, 64, 4, 4), widen_groups_below=width)
        (convolution,) = [node for node in onnx.load(path).graph.node if node.op_type == "Conv"]
        widths += [64 // attribute.i for attribute in convolution.attribute if attribute.name == "group"]
    assert widths == [16, 8]


def test_the_file_tells_its_plan_and_version_and_no_folder(written: onnx.ModelProto, model: nn.Module) -> None:
    metadata = {entry.key: entry.value for entry in written.metadata_props}
    assert metadata == {
        "strucspars.version": ss.__version__,
        "strucspars.num_gathers": "3",
        "strucspars.samples_are_independent": "true",
        "strucspars.plan_sha256": plan_hash(ss.model_plan(model)),
    }
    assert not any(item.metadata_props for item in (written.graph, *written.graph.node, *written.graph.value_info))
    assert str(Path(torch.__file__).parent).encode() not in written.SerializeToString()
    assert str(Path(__file__).parent).encode() not in written.SerializeToString()


def test_the_hash_of_a_plan_is_that_of_its_grouped_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3))
    plan = ss.one_shot_plan(model, target=0.2)
    assert any(layer.group_level == 1 for layer in plan.layers.values())
    assert plan_hash(plan) == plan_hash(ss.model_plan(ss.convert_(model, plan)))
    other = reordered_plan(plan, "random", seed=1)
    assert plan_hash(other) != plan_hash(plan)


def test_the_hash_of_a_plan_does_not_depend_on_the_order_of_its_layers() -> None:
    plan = ss.one_shot_plan(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)), target=0.5)
    assert [layer.group_level > 1 for layer in plan.layers.values()] == [True, True]
    assert plan_hash(replace(plan, layers=dict(reversed(list(plan.layers.items()))))) == plan_hash(plan)


def test_a_folded_graph_tells_the_plan_of_the_network_it_was_made_of(model: nn.Module) -> None:
    folded = ss.fold(model, (IMAGES, torch.randn(2, 8)))
    assert hash_of_model(folded) == hash_of_model(model) == plan_hash(ss.model_plan(model))


def test_a_dense_model_has_no_plan_to_tell_of(small: nn.Module, tmp_path: Path) -> None:
    ss.export(small, tmp_path / "network.onnx", example_inputs=IMAGES)
    keys = {entry.key for entry in onnx.load(tmp_path / "network.onnx").metadata_props}
    assert keys == {"strucspars.version", "strucspars.num_gathers", "strucspars.samples_are_independent"}


def test_given_names_win_over_those_inside_the_graph(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1))
    # What the exporter itself would call values inside.
    ss.export(model, tmp_path / "network.onnx", example_inputs=IMAGES, input_names=["relu"], output_names=["conv2d"])
    written = onnx.load(tmp_path / "network.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert list(named_shapes(written.graph.input)) == ["relu"]
    assert list(named_shapes(written.graph.output)) == ["conv2d"]


def test_a_fixed_batch_and_a_batch_of_one_are_kept_apart(small: nn.Module, tmp_path: Path) -> None:
    fixed = ss.export(small, tmp_path / "network.onnx", example_inputs=IMAGES[:1], dynamic_batch=False)
    assert fixed.agreement.batch_sizes == (1,)
    assert named_shapes(onnx.load(tmp_path / "network.onnx").graph.input) == {"input": [1, 8, 8, 8]}
    free = ss.export(small, tmp_path / "network.onnx", example_inputs=IMAGES[:1])
    assert free.agreement.batch_sizes == (1, 3)
    assert named_shapes(onnx.load(tmp_path / "network.onnx").graph.input) == {"input": ["batch", 8, 8, 8]}


def test_the_batch_is_named_wherever_it_stands_and_nothing_else_is() -> None:
    inputs, outputs = (
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
        for shapes in ({"images": ("s7", 3), "other": ("s77", 3)}, {"output": ("2*s7 + s77", 3)})
    )
    graph = helper.make_graph([], "sizes", inputs, outputs)
    name_batch_axis_(graph, [True, False])
    assert named_shapes(graph.input) == {"images": ["batch", 3], "other": ["s77", 3]}
    assert named_shapes(graph.output) == {"output": ["2*batch + s77", 3]}


def test_a_dictionary_of_tensors_names_the_outputs(tmp_path: Path) -> None:
    class Segmenting(nn.Module):
        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": images + 1, "aux": images * 2}

    ss.export(Segmenting(), tmp_path / "network.onnx", example_inputs=IMAGES)
    assert list(named_shapes(onnx.load(tmp_path / "network.onnx").graph.output)) == ["out", "aux"]


def test_large_weights_go_into_a_second_file(small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = nn.Sequential(nn.Conv2d(8, 64, 3), nn.ReLU())
    monkeypatch.setattr(onnx_export, "LARGEST_MESSAGE", 4096)
    report = ss.export(big, tmp_path / "network.onnx", example_inputs=IMAGES)
    names = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(names) == {"network.onnx", "network.onnx.data"}
    assert report.nbytes == sum(names.values())
    assert names["network.onnx"] < 4096
    session = onnxruntime.InferenceSession(tmp_path / "network.onnx", providers=["CPUExecutionProvider"])
    (features,) = session.run(None, {"input": IMAGES.numpy()})
    torch.testing.assert_close(torch.from_numpy(features), big(IMAGES).detach(), rtol=1e-4, atol=1e-5)


def test_the_exporter_keeps_quiet(
    small: nn.Module, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ss.export(small, tmp_path / "network.onnx", example_inputs=IMAGES)
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_runtime_that_computes_something_else_gets_no_file(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "network.onnx"
    path.write_text("the former one")
    load = onnx_export.OnnxExporter.load

    def wrong(self: onnx_export.OnnxExporter, path: Path) -> Inference:
        run = load(self, path)
        return lambda arguments: [output.roll(1, dims=1) for output in run(arguments)]

    monkeypatch.setattr(onnx_export.OnnxExporter, "load", wrong)
    with pytest.raises(
        ExportMismatch, match=r"ONNX Runtime .* at batch size 2: output 0 is off by .*0\.0001"
    ) as caught:
        ss.export(small, path, example_inputs=IMAGES)
    assert str(path) in str(caught.value)
    assert path.read_text() == "the former one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_spoilt_on_its_way_gets_no_name(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "network.onnx"

    def spoiling(model: onnx.ModelProto, to: Path) -> None:
        weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 4)
        weight.raw_data = bytes(len(weight.raw_data))
        to.write_bytes(model.SerializeToString())

    monkeypatch.setattr(onnx_export, "write_onnx", spoiling)
    with pytest.raises(ExportMismatch, match="something else"):
        ss.export(small, path, example_inputs=IMAGES)
    monkeypatch.setattr(onnx_export, "write_onnx", lambda model, to: to.write_bytes(b"nonsense"))
    with pytest.raises(ValueError, match=r"ONNX Runtime .* cannot read .*network\.onnx"):
        ss.export(small, path, example_inputs=IMAGES)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_and_a_missing_folder_are_named(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with pytest.raises(FileNotFoundError, match=r"cannot write .*missing.*create its folder first"):
        ss.export(small, tmp_path / "missing" / "network.onnx", example_inputs=IMAGES)
    path = tmp_path / "network.onnx"
    path.write_text("the former one")
    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match=r"cannot write .*network\.onnx: No space left on device; .*free some space"):
        ss.export(small, path, example_inputs=IMAGES)
    assert path.read_text() == "the former one"
    assert list(tmp_path.iterdir()) == [path]


class Detector(nn.Module):
    """Lists of tensors under keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 4, 1)

    def forward(self, images: torch.Tensor) -> dict[str, Any]:
        features = self.layer(images)
        return {"classes": [features, features + 1], "boxes": {"small": features - 1}}


def test_outputs_below_keys_are_called_after_them(tmp_path: Path) -> None:
    ss.export(Detector(), tmp_path / "model.onnx", example_inputs=IMAGES)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [output.name for output in session.get_outputs()] == ["classes_0", "classes_1", "boxes_small"]
