"""Every format, on networks that are hard on folding: the file computes what the network computes."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
import torch
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.core.plan import Preprocessing
from strucspars.export.checked import EXPORTERS, find_exporter
from strucspars.export.program import PREPROCESSING_KEY, Arguments
from strucspars.export.storage import plan_hash
from strucspars.io.records import convert
from strucspars.models.cifar import CifarResNet, PreactivationResNet
from strucspars.train.slimming import select_channels, slim_

Shuffled = Callable[..., ss.ShuffledGroupConv2d]
IMAGES = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(1))
PICTURES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
FORMATS = ("onnx", "openvino", "torch")


class Residual(nn.Module):
    """A stream that is added to in place, one layer called twice, functions instead of modules."""

    def __init__(self, shuffled: Shuffled) -> None:
        super().__init__()
        self.first, self.shared, self.norm = shuffled(), shuffled(kernel_size=1), nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stream = functional.relu(self.norm(self.first(images)))
        for _ in range(2):
            stream += self.shared(stream)
            functional.relu_(stream)
        scores: torch.Tensor = self.last(stream.mean((2, 3)))
        return scores


class Concatenating(nn.Module):
    """Dense connections."""

    def __init__(self, shuffled: Shuffled) -> None:
        super().__init__()
        self.first, self.second, self.third = shuffled(), shuffled(16), shuffled(24, 16, 1)
        self.act = nn.PReLU(16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = torch.cat([images, self.first(images)], 1)
        second = torch.cat([first, self.second(first)], 1)
        features: torch.Tensor = self.act(self.third(second))
        return features


class Untraceable(nn.Module):
    """A loop over a size: torch.fx gives up, torch.export does not."""

    def __init__(self, shuffled: Shuffled) -> None:
        super().__init__()
        self.layers = nn.ModuleList([shuffled(), shuffled(kernel_size=1)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for place in range(int(images.shape[1] / 4)):
            images = self.layers[place](images)
        return images


class SeveralInputs(nn.Module):
    """Two inputs with a batch and one without; a nest of outputs, one of them twice."""

    def __init__(self, shuffled: Shuffled) -> None:
        super().__init__()
        self.grouped = shuffled()

    def forward(self, images: torch.Tensor, offset: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        features = self.grouped(images) * scale + offset[:, :, None, None]
        return {"features": features, "pooled": (features.mean((2, 3)), [features])}


def every_layer_grouped(model: nn.Module) -> nn.Module:
    """Random orders everywhere, and batch norms that do something."""
    generator = np.random.default_rng(0)
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            out_channels, in_channels = module.weight.shape[:2]
            layers[name] = ss.LayerPlan(
                group_level=min(3, ss.core.max_group_level(out_channels, in_channels)),
                out_perm=generator.permutation(out_channels),
                in_perm=generator.permutation(in_channels),
                weight_shape=tuple(module.weight.shape),
            )
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                assert tensor is not None
                nn.init.uniform_(tensor, 0.5, 1.5)
    return ss.convert_(model, ss.GroupingPlan(layers))


def slimmed() -> nn.Module:
    model = CifarResNet(8)
    return slim_(model, select_channels(model, target=0.3))


NETWORKS: dict[str, tuple[Callable[[Shuffled], nn.Module], Arguments, int]] = {
    "residual": (Residual, (IMAGES,), 4),
    "concatenating": (Concatenating, (IMAGES,), 4),
    "untraceable": (Untraceable, (IMAGES,), 4),
    "several inputs": (SeveralInputs, (IMAGES, torch.randn(2, 8), torch.randn(8, 8)), 2),
    "pre-activation": (lambda _: every_layer_grouped(PreactivationResNet(11)), (PICTURES,), -1),
    "slimmed": (lambda _: slimmed(), (PICTURES,), 0),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_file_computes_what_the_network_computes(name: str, format: str, shuffled: Shuffled, tmp_path: Path) -> None:
    build, arguments, num_gathers = NETWORKS[name]
    file_name = f"network{EXPORTERS.find(format).suffix}"
    model = build(shuffled)
    before = copy.deepcopy(model.state_dict())
    report = ss.export(model, tmp_path / file_name, example_inputs=arguments, format=format, widen_groups_below=1)
    assert report.num_gathers == num_gathers or num_gathers < 0
    assert report.agreement.batch_sizes == (2, 1)
    assert report.agreement.max_relative_error <= 1e-4
    assert report.nbytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert model.training
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    check_other_batch(model, EXPORTERS.find(format).load(tmp_path / file_name), arguments)


def check_other_batch(model: nn.Module, run: Callable[[Arguments], Any], arguments: Arguments) -> None:
    """Not what the export itself has tried."""
    others = tuple(torch.randn(5, *each.shape[1:]) if len(each) == 2 else torch.randn(each.shape) for each in arguments)
    with torch.no_grad():
        expected = model.eval()(*others)
    if isinstance(expected, dict):
        expected = [expected["features"], *expected["pooled"][:1], *expected["pooled"][1]]
    torch.testing.assert_close(
        run(others), expected if isinstance(expected, list) else [expected], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_folded_graph_is_taken_as_it_is(format: str, shuffled: Shuffled, tmp_path: Path) -> None:
    file_name = f"network{EXPORTERS.find(format).suffix}"
    model = Residual(shuffled)
    folded = ss.fold(model, IMAGES)
    code = folded.code
    # Another batch than that of the export: the bytes are those of the folding.
    report = ss.export(folded, tmp_path / file_name, example_inputs=IMAGES[:1], format=format)
    assert report.num_gathers == len(ss.fold_report(folded).gathers)
    assert report.gathered_bytes == ss.fold_report(folded).gathered_bytes
    with pytest.raises(ValueError, match="widen_groups_below=16 comes too late"):
        ss.export(folded, tmp_path / file_name, example_inputs=IMAGES, format=format, widen_groups_below=16)
    with pytest.raises(ValueError, match="widen_groups_below must be a whole number from 1 on"):
        ss.export(folded, tmp_path / file_name, example_inputs=IMAGES, format=format, widen_groups_below=0)
    assert folded.code == code
    check_other_batch(model, EXPORTERS.find(format).load(tmp_path / file_name), (IMAGES,))


def test_a_masked_model_and_a_wider_group_are_exported(shuffled: Shuffled, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    ss.mask_(model, ss.one_shot_plan(model, target=0.4))
    assert ss.export(model, tmp_path / "masked.pt2", example_inputs=IMAGES, format="torch").num_gathers == 0
    report = ss.export(shuffled(), tmp_path / "wide.pt2", example_inputs=IMAGES, format="torch", widen_groups_below=8)
    assert report.num_gathers == 0


@pytest.mark.parametrize("format", FORMATS)
def test_half_precision_is_checked_with_a_wider_tolerance(format: str, shuffled: Shuffled, tmp_path: Path) -> None:
    file_name = f"network{EXPORTERS.find(format).suffix}"
    report = ss.export(shuffled().half(), tmp_path / file_name, example_inputs=IMAGES.half(), format=format)
    assert 1e-4 < report.agreement.tolerance < 0.1


def test_a_precision_that_a_runtime_lacks_is_refused(shuffled: Shuffled, tmp_path: Path) -> None:
    for format, name in (("onnx", "network.onnx"), ("openvino", "network.xml")):
        with pytest.raises(ValueError, match=r"cannot run .*model\.float\(\)"):
            ss.export(shuffled().bfloat16(), tmp_path / name, example_inputs=IMAGES.bfloat16(), format=format)
    assert list(tmp_path.iterdir()) == []


class FixedBatch(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.view(2, -1)


class Branching(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images if images.sum() > 0 else -images


class WithoutOnnxForm(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = torch.linalg.svd(images)[1]
        return values


def test_what_cannot_be_exported_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "network.pt2"
    with pytest.raises(ValueError, match="where it fixes the batch size, pass dynamic_batch=False"):
        ss.export(FixedBatch(), path, example_inputs=IMAGES, format="torch")
    assert ss.export(
        FixedBatch(), path, example_inputs=IMAGES, format="torch", dynamic_batch=False
    ).agreement.batch_sizes == (2,)
    with pytest.raises(ValueError, match=r"torch\.export cannot trace the network: .*branch on the values"):
        ss.export(Branching(), path, example_inputs=IMAGES, format="torch")
    with pytest.raises(ValueError, match=r"cannot be written as ONNX: .*svd.*; try format='torch'"):
        ss.export(WithoutOnnxForm(), tmp_path / "network.onnx", example_inputs=IMAGES)
    assert [file.name for file in tmp_path.iterdir()] == ["network.pt2"]
    assert capfd.readouterr() == ("", "")


def test_a_remedy_that_was_taken_already_is_not_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"its code must not branch on the values of tensors$"):
        ss.export(Branching(), tmp_path / "network.pt2", example_inputs=IMAGES, format="torch", dynamic_batch=False)


def test_a_program_tells_its_plan_and_version_and_no_folder(shuffled: Shuffled, tmp_path: Path) -> None:
    model, path = shuffled(), tmp_path / "network.pt2"
    report = ss.export(model, path, example_inputs=IMAGES, format="torch")
    # It fills in all that the file has, if one is asked for.
    told = {"strucspars.version": ""}
    torch.export.load(path, extra_files=told)
    assert told == {
        "strucspars.version": ss.__version__,
        "strucspars.num_gathers": "2",
        "strucspars.samples_are_independent": "true",
        "strucspars.plan_sha256": plan_hash(ss.model_plan(model)),
    }
    assert report.runtime == f"torch.export {torch.__version__}"
    for module in (ss, torch):
        assert str(Path(module.__file__ or "").parent).encode() not in path.read_bytes()


def test_a_full_disk_is_told_of_a_program_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match=r"cannot write .*network\.pt2: No space left on device; .*free some space"):
        ss.export(nn.Conv2d(8, 4, 1), tmp_path / "network.pt2", example_inputs=IMAGES, format="torch")
    assert not list(tmp_path.iterdir())


class Rescaled(nn.Module):
    """An input that is no batch, but as long as the example's batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, images: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(images * scale)
        return features


def test_what_was_taken_for_a_batch_by_its_length_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"example_inputs\[0\] and example_inputs\[1\] were taken for batches"):
        ss.export(
            Rescaled(),
            tmp_path / "network.pt2",
            example_inputs=(torch.randn(1, 3, 8, 8), torch.ones(1)),
            format="torch",
        )


@pytest.mark.parametrize(
    ("format", "name", "right"),
    [
        ("onnx", "network.XML", "network.onnx"),
        ("onnx", "network.bin", "network.onnx"),
        ("torch", "network.onnx", "network.pt2"),
        ("openvino", "network.onnx", "network.xml"),
        ("openvino", "network", "network.xml"),
        ("openvino", "network.XML", "network.xml"),
        ("onnx", ".", "network.onnx"),
    ],
)
def test_a_file_ends_as_its_format_says(
    format: str, name: str, right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name != ".":
        Path(name).write_text("of another format")
    with pytest.raises(ValueError, match=rf"of the format {format} ends in .*, got {name}; write to {right}$"):
        ss.export(nn.Conv2d(3, 4, 1), name, example_inputs=torch.ones(1, 3, 4, 4), format=format)
    assert name == "." or Path(name).read_text() == "of another format"


def test_names_are_refused_by_a_format_that_keeps_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the format torch keeps no input_names and output_names"):
        ss.export(
            nn.Identity(), tmp_path / "network.pt2", example_inputs=IMAGES, format="torch", input_names=["images"]
        )


def test_an_unknown_format_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"format must be one of onnx, openvino, torch.* got 'tflite'"):
        ss.export(nn.Identity(), tmp_path / "network.tflite", example_inputs=IMAGES, format="tflite")


def test_a_class_in_place_of_an_exporter_is_refused(tmp_path: Path) -> None:
    format = "strucspars.export.program:TorchExporter"
    with pytest.raises(ValueError, match=f"format '{format}' must name an instance of a subclass of Exporter"):
        ss.export(nn.Identity(), tmp_path / "network.pt2", example_inputs=IMAGES, format=format)


def test_every_format_keeps_what_images_go_through_before_the_network(tmp_path: Path) -> None:
    model, image = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.zeros(1, 3, 8, 8)
    preprocessing = Preprocessing(size=8, resize=9)
    paths = {format: tmp_path / f"model{find_exporter(format).suffix}" for format in FORMATS}
    for format, path in paths.items():
        ss.export(model, path, example_inputs=image, format=format, preprocessing=preprocessing)
    extra = {PREPROCESSING_KEY: ""}
    torch.export.load(paths["torch"], extra_files=extra)
    read = openvino.Core().read_model(paths["openvino"])
    told = {
        "onnx": {entry.key: entry.value for entry in onnx.load(paths["onnx"]).metadata_props}[PREPROCESSING_KEY],
        "openvino": read.get_rt_info(PREPROCESSING_KEY.split(".")).astype(str),
        "torch": extra[PREPROCESSING_KEY],
    }
    for text in told.values():
        assert convert(Preprocessing, json.loads(text), "the file") == preprocessing
