"""Which channels can go together, and why others stay."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from strucspars.channels.sharing import UntraceableNetwork
from strucspars.models.cifar import CifarResNet, PreactivationResNet
from strucspars.prune.classes import PrunableChannels, prunable_channels

IMAGES = torch.zeros(1, 3, 8, 8)


def reasons(model: nn.Module) -> dict[str, str]:
    return {name: each.reason for name, each in prunable_channels(model, IMAGES).classes.items()}


def test_a_residual_stream_is_one_class_with_all_that_write_and_read_it() -> None:
    stream = prunable_channels(PreactivationResNet(20), torch.zeros(1, 3, 32, 32)).classes["layer2.0.conv3"]
    assert stream.writers == ("layer2.0.conv3", "layer2.0.shortcut", "layer2.1.conv3")
    assert stream.readers == ("layer2.1.conv1", "layer3.0.conv1", "layer3.0.shortcut")
    assert stream.norms == ("layer2.1.bn1", "layer3.0.bn1")
    assert stream.is_stream
    assert not stream.reason


def test_channels_that_padding_adds_stay_but_those_before_can_go() -> None:
    channels = prunable_channels(CifarResNet(20), torch.zeros(1, 3, 32, 32))
    assert channels.modules["layer2.0.conv2"].outputs == ("conv1", "layer2.0.conv2")
    assert not channels.classes["conv1"].reason
    assert channels.classes["layer2.0.conv2"].reason == "the network's code has their number in it"


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.depthwise = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=4)
        self.linear = nn.Linear(64, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.linear(self.depthwise(self.conv(images)).flatten(1))
        return features


def test_after_flattening_every_channel_is_a_run_of_inputs() -> None:
    channels = prunable_channels(Flattening(), IMAGES)
    assert channels.modules["linear"].inputs == ("conv",)
    assert channels.modules["linear"].repeat == 16
    assert channels.classes["conv"].norms == ("depthwise",)
    assert set(channels.sides({"conv": ...})) == {"conv", "depthwise", "linear"}
    assert not channels.sides({"conv": ...})["conv"].inputs


class Between(nn.Module):
    """Something between two convolutions."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Conv2d(3, 8, 1), between, nn.Conv2d(8, 5, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.last(self.between(self.first(images)))
        return features


class Function(nn.Module):
    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.code == "split":
            first, second = features.chunk(2, 1)
            return torch.cat([second, first], 1)
        if self.code == "width":
            scaled: torch.Tensor = features * features.shape[1] ** -0.5
            return scaled
        if self.code == "batch size":
            flat: torch.Tensor = features.mean((2, 3)).view(features.size(0), -1)
            return flat.unsqueeze(2).unsqueeze(3)
        if self.code == "image size":
            return functional.interpolate(features[:, :, ::2], size=features.shape[-2:])
        if self.code == "shape":
            summed: torch.Tensor = features * features.shape[:2][1]
            return summed
        if self.code == "divide":
            return functional.relu(features) / features
        if self.code == "pad":
            return functional.pad(features, (0, 0, 0, 0, 4, 0))[:, 4:]
        ordered: torch.Tensor = features.sort(1)[0]
        return ordered


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (nn.ReLU(), ""),
        (nn.PReLU(), ""),
        (nn.PReLU(8), ""),
        (nn.BatchNorm2d(8), ""),
        (nn.GroupNorm(1, 8), "GroupNorm 'between' takes the mean over all of them"),
        (nn.GroupNorm(2, 8), "GroupNorm 'between' needs all of them in their order"),
        (nn.Softmax(1), "Softmax 'between' needs all of them in their order"),
        (Function("split"), "the network's code has their number in it"),
        (Function("batch size"), ""),
        (Function("image size"), ""),
        (Function("shape"), "the network's code reads their number"),
        (Function("width"), "the network's code reads their number"),
        (Function("pad"), "the network's code has their number in it"),
        (Function("divide"), "something is divided by them"),
        (Function("sort"), "the operation sort needs all of them in their order"),
    ],
)
def test_a_class_that_cannot_lose_channels_says_why(between: nn.Module, reason: str) -> None:
    assert reasons(Between(between))["first"] == reason


def test_the_outputs_of_the_network_stay() -> None:
    assert reasons(Between(nn.ReLU()))["last"] == "the network returns them"


def test_tensors_that_two_modules_share_stay() -> None:
    model = Between(nn.Conv2d(8, 8, 1))
    other = nn.Conv2d(8, 8, 1)
    assert isinstance(model.between, nn.Conv2d)
    other.weight = model.between.weight
    model.between = nn.Sequential(model.between, other)
    assert reasons(model)["first"] == "Conv2d 'between.0' shares a parameter with 'between.1'"


class ReadsWeight(Between):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) * self.first.weight.sum()


def test_a_tensor_that_the_code_reads_keeps_its_shape() -> None:
    assert reasons(ReadsWeight(nn.ReLU()))["first"] == "the network's code reads a tensor of Conv2d 'first' directly"


def test_layers_with_groups_of_their_own_are_noted() -> None:
    channels: PrunableChannels = prunable_channels(Between(nn.Conv2d(8, 8, 1, groups=4)), IMAGES)
    assert channels.own_groups == {"between": 4}
    assert not channels.classes["first"].reason


def test_a_network_that_cannot_be_traced_is_refused() -> None:
    class Branching(Between):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) if images.sum() > 0 else images

    with pytest.raises(UntraceableNetwork, match="change the code there"):
        prunable_channels(Branching(nn.ReLU()), IMAGES)
