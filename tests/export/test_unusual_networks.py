"""Files of networks that come wrapped, from other libraries, or with inputs that cannot be given."""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import onnx
import pytest
import torch
import torchvision
from data_parallel import parallel
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torchvision.models.feature_extraction import create_feature_extractor

import strucspars as ss
from strucspars.export.checked import EXPORTERS
from strucspars.export.program import INDEPENDENT_KEY

Shuffled = Callable[..., ss.ShuffledGroupConv2d]
IMAGES = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(1))
FORMATS = ("onnx", "openvino", "torch")


class ByKeyword(nn.Module):
    def forward(self, *, image: torch.Tensor) -> torch.Tensor:
        return image + 1


def test_a_wrapped_network_exports_with_as_many_gathers_as_its_report_says(shuffled: Shuffled, tmp_path: Path) -> None:
    model = nn.Sequential(shuffled(), nn.BatchNorm2d(8), nn.ReLU(), shuffled(), nn.Conv2d(8, 4, 1)).eval()
    path = tmp_path / "network.onnx"
    bare = ss.export(model, path, example_inputs=IMAGES, widen_groups_below=1).num_gathers
    for wrapped in (parallel(model), torch.compile(model, backend="eager")):
        report = ss.export(cast(nn.Module, wrapped), path, example_inputs=IMAGES, widen_groups_below=1)
        kinds = [node.op_type for node in onnx.load(path).graph.node]
        assert report.num_gathers == bare == kinds.count("Gather")
        assert "BatchNormalization" not in kinds


def test_a_feature_extractor_of_torchvision_exports(tmp_path: Path) -> None:
    model = create_feature_extractor(torchvision.models.resnet18(weights=None), {"layer1": "first"}).eval()
    report = ss.export(model, tmp_path / "features.onnx", example_inputs=torch.randn(2, 3, 32, 32))
    assert report.agreement.num_outputs == 1


def test_inputs_by_keyword_only_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be called with example_inputs by position: .*wrap the network"):
        ss.export(ByKeyword(), tmp_path / "network.onnx", example_inputs=IMAGES)
    assert not list(tmp_path.iterdir())


class Writing(nn.Module):
    """Changes its input in place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(images.add_(1))
        return features


def test_a_network_that_writes_into_its_inputs_exports_and_leaves_the_example(
    shuffled: Shuffled, tmp_path: Path
) -> None:
    example, told = IMAGES.clone(), {INDEPENDENT_KEY: ""}
    ss.export(Writing(shuffled()), tmp_path / "network.pt2", example_inputs=example, format="torch")
    torch.export.load(tmp_path / "network.pt2", extra_files=told)
    assert told[INDEPENDENT_KEY] == "true"
    EXPORTERS.find("torch").load(tmp_path / "network.pt2")((example,))
    assert torch.equal(example, IMAGES)


class AnyNumber(nn.Module):
    """Takes all of its inputs as one tuple."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(images[0]) + images[1]
        return features


class OneAndMore(AnyNumber):
    """Its first input has a name, and its last is no batch."""

    def forward(self, image: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # another network
        features: torch.Tensor = self.layer(image) * others[1] + others[0]
        return features


# Folding and naming do not depend on the format, so the slow ones are tried once.
@pytest.mark.parametrize(
    ("format", "build", "folded"),
    [
        ("torch", AnyNumber, False),
        ("torch", AnyNumber, True),
        ("torch", OneAndMore, False),
        ("torch", OneAndMore, True),
        ("onnx", OneAndMore, False),
        ("openvino", OneAndMore, True),
    ],
)
def test_a_network_that_takes_any_number_of_inputs_exports(
    format: str, build: type[AnyNumber], folded: bool, shuffled: Shuffled, tmp_path: Path
) -> None:
    inputs = (IMAGES, IMAGES + 1) if build is AnyNumber else (IMAGES, IMAGES + 1, torch.randn(8, 8))
    name = f"network{EXPORTERS.find(format).suffix}"
    model = build(shuffled()).eval()
    given = ss.fold(model, inputs) if folded else model
    assert ss.export(given, tmp_path / name, example_inputs=inputs, format=format).agreement.batch_sizes == (2, 1)
    others = tuple(torch.randn(5, 8, 8, 8) if tensor.dim() == 4 else tensor for tensor in inputs)
    expected = [model(*others).detach()]
    torch.testing.assert_close(
        list(EXPORTERS.find(format).load(tmp_path / name)(others)), expected, rtol=1e-4, atol=1e-4
    )
    if format == "torch":
        report = ss.export(given, tmp_path / name, example_inputs=inputs, format=format, dynamic_batch=False)
        assert report.agreement.batch_sizes == (2,)


SCALE = torch.tensor([3.0])


class Scaled(nn.Module):
    """The default of an argument is a tensor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 1), layer, nn.Conv2d(8, 4, 1))

    def forward(self, images: torch.Tensor, scale: torch.Tensor = SCALE) -> torch.Tensor:
        features: torch.Tensor = self.layers(images) * scale
        return features


@pytest.mark.parametrize(
    ("format", "inputs"),
    [("torch", (IMAGES,)), ("torch", (IMAGES, torch.tensor([5.0]))), ("onnx", (IMAGES,)), ("openvino", (IMAGES,))],
)
def test_a_network_with_a_tensor_for_a_default_exports_without_shuffles(
    format: str, inputs: tuple[torch.Tensor, ...], shuffled: Shuffled, tmp_path: Path
) -> None:
    name = f"network{EXPORTERS.find(format).suffix}"
    model = Scaled(shuffled()).eval()
    assert ss.export(model, tmp_path / name, example_inputs=inputs, format=format).num_gathers == 0
    expected = [model(*inputs).detach()]
    torch.testing.assert_close(
        list(EXPORTERS.find(format).load(tmp_path / name)(inputs)), expected, rtol=1e-4, atol=1e-4
    )


def test_any_number_of_inputs_are_numbered_or_get_the_names_that_are_given(shuffled: Shuffled, tmp_path: Path) -> None:
    def names(**options: Sequence[str]) -> list[str]:
        path = tmp_path / "network.onnx"
        ss.export(AnyNumber(shuffled()), path, example_inputs=(IMAGES, IMAGES), **options)  # type: ignore[arg-type]  # names only
        return [value.name for value in onnx.load(path).graph.input]

    assert names() == ["input_1", "input_2"]
    assert names(input_names=["left", "right"]) == ["left", "right"]


class Detections(NamedTuple):
    boxes: torch.Tensor
    scores: list[torch.Tensor]


class Returning(nn.Module):
    """Puts its two outputs into a container."""

    def __init__(self, layer: nn.Module, contained: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.contained = layer, contained

    def forward(self, images: torch.Tensor) -> Any:
        features = self.layer(images)
        return self.contained(features, features.mean((2, 3)))


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], type]] = {
    "named tuple": (lambda boxes, scores: Detections(boxes, [scores]), tuple),
    "named tuple below a key": (lambda boxes, scores: {"found": Detections(boxes, [scores])}, dict),
    "mapping": (lambda boxes, scores: UserDict(boxes=boxes, scores=scores), dict),
    "ordered dictionary": (lambda boxes, scores: OrderedDict(boxes=boxes, scores=scores), dict),
    "what torch returns": (lambda boxes, _: boxes.max(1), tuple),
}


@pytest.mark.parametrize(
    ("name", "format"),
    [*((name, "torch") for name in CONTAINERS), ("mapping", "onnx"), ("named tuple below a key", "openvino")],
)
def test_outputs_in_containers_of_other_classes_are_exported(
    name: str, format: str, shuffled: Shuffled, tmp_path: Path
) -> None:
    contained, plain = CONTAINERS[name]
    file_name = f"network{EXPORTERS.find(format).suffix}"
    model = Returning(shuffled(), contained)
    assert ss.export(model, tmp_path / file_name, example_inputs=IMAGES, format=format).agreement.num_outputs == 2
    assert type(model(IMAGES)) is type(contained(IMAGES, IMAGES))
    if format == "torch":
        folded = ss.export(ss.fold(model, IMAGES), tmp_path / file_name, example_inputs=IMAGES, format=format)
        assert folded.agreement.num_outputs == 2
        assert type(torch.export.load(tmp_path / file_name).module()(IMAGES)) is plain


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_zeros_around_negative_numbers_stay_the_maximum(format: str, tmp_path: Path) -> None:
    # The stem of timm's resnetv2_50x1_bit. ONNX Runtime would leave the zeros out.
    model = nn.Sequential(nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, 2)).eval()
    images = -1 - torch.rand(2, 8, 9, 9, generator=torch.Generator().manual_seed(0))
    assert (model(images) == 0).any()
    path = tmp_path / f"network{EXPORTERS.find(format).suffix}"
    assert ss.export(model, path, example_inputs=images, format=format).agreement.num_outputs == 1


@dataclass
class Pair:
    boxes: torch.Tensor
    scores: torch.Tensor


@pytest.mark.parametrize("format", FORMATS)
def test_a_dataclass_of_outputs_is_refused_by_its_name(format: str, shuffled: Shuffled, tmp_path: Path) -> None:
    name = f"network{EXPORTERS.find(format).suffix}"
    with pytest.raises(ValueError, match=r"returns a Pair; .*: wrap the network"):
        ss.export(Returning(shuffled(), Pair), tmp_path / name, example_inputs=IMAGES, format=format)
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class Side:
    name: str


def test_what_torch_cannot_write_is_refused_with_the_remedy(shuffled: Shuffled, tmp_path: Path) -> None:
    model = Returning(shuffled(), lambda boxes, scores: {Side("left"): boxes, Side("right"): scores})
    with pytest.raises(ValueError, match=r"torch\.export cannot write the network: .+; try another format"):
        ss.export(model, tmp_path / "network.pt2", example_inputs=IMAGES, format="torch")
    assert not list(tmp_path.iterdir())
    assert ss.export(model, tmp_path / "network.onnx", example_inputs=IMAGES).agreement.num_outputs == 2


def test_a_parametrisation_of_a_grouped_layer_is_refused_with_the_remedy(shuffled: Shuffled, tmp_path: Path) -> None:
    name, format = "network.pt2", "torch"
    model = nn.Sequential(shuffled(), nn.ReLU(), parametrizations.spectral_norm(shuffled()))
    with pytest.raises(ValueError, match=r"layer '2' has no plain weight: .*, or remove the parametrisation"):
        ss.export(model, tmp_path / name, example_inputs=IMAGES, format=format)
    assert not list(tmp_path.iterdir())
    parametrize.remove_parametrizations(model[2], "weight")
    assert ss.export(model, tmp_path / name, example_inputs=IMAGES, format=format).agreement.num_outputs == 1
