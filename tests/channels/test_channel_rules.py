"""Operations that a shuffle goes through, and their look-alikes that it must not: equality, and what remains."""

from collections.abc import Callable

import pytest
import timm
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.models.cifar import CifarResNet
from strucspars.nn.layers import ShuffledGroupLinear

CHANNELS, GROUPS = 16, 4
IMAGES = torch.randn(3, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(1))
Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def shuffled(in_channels: int = CHANNELS, out_channels: int = CHANNELS) -> ss.ShuffledGroupConv2d:
    layer = ss.ShuffledGroupConv2d(in_channels, out_channels, 1, groups=GROUPS)
    layer.in_perm.copy_(torch.randperm(in_channels))
    layer.out_inverse.copy_(torch.randperm(out_channels))
    return layer


def dense(in_channels: int = CHANNELS) -> nn.Conv2d:
    return nn.Conv2d(in_channels, CHANNELS, 1)


def remaining(model: nn.Module, images: torch.Tensor = IMAGES) -> int:
    """The number of gathers that are left in a graph which computes the same, for another batch than the example."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.5, 1.5)
    folded = ss.fold(model.eval(), images)
    assert ss.fold_report(folded).untraced_reason == ""
    others = torch.randn(images.shape[0] + 1, *images.shape[1:])
    with torch.no_grad():
        torch.testing.assert_close(folded(others), model(others), rtol=1e-4, atol=1e-5)
    return len(ss.fold_report(folded).gathers)


class FirstOfTwo(nn.Module):
    """Pooling that also returns the places of the largest values, which are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.pool(features)[0]
        return pooled


FREE_MODULES: dict[str, Callable[[], nn.Module]] = {
    "one slope for all": nn.PReLU,
    "a slope per channel": lambda: nn.PReLU(CHANNELS),
    "norm over all channels": lambda: nn.GroupNorm(1, CHANNELS),
    "norm over all channels, plain": lambda: nn.GroupNorm(1, CHANNELS, affine=False),
    "constant padding": lambda: nn.ConstantPad2d((1, 0, 2, 1), 0.5),
    "softmax over positions": lambda: nn.Softmax(dim=-1),
    "log softmax over positions": lambda: nn.LogSoftmax(dim=2),
}
NATURAL_MODULES: dict[str, Callable[[], nn.Module]] = {
    "norm over some channels": lambda: nn.GroupNorm(2, CHANNELS),
    "softmax over channels": lambda: nn.Softmax(dim=1),
    "softmax over channels, counted from the end": lambda: nn.Softmax(dim=-3),
    "padding of channels by module": lambda: nn.Sequential(nn.ConstantPad3d((0, 0, 0, 0, 1, -1), 0.5)),
    "transposed convolution": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 2),
    "pooling with two results": FirstOfTwo,
}


@pytest.mark.parametrize("name", FREE_MODULES)
def test_shuffles_go_through_modules_that_treat_channels_alike(name: str) -> None:
    assert remaining(nn.Sequential(dense(), shuffled(), FREE_MODULES[name](), dense())) == 0
    assert remaining(nn.Sequential(dense(), FREE_MODULES[name](), shuffled(), dense())) == 0


@pytest.mark.parametrize("name", NATURAL_MODULES)
def test_modules_that_look_at_the_order_get_the_natural_one(name: str) -> None:
    assert remaining(nn.Sequential(dense(), shuffled(), NATURAL_MODULES[name](), dense())) == 1


class Functions(nn.Module):
    """A function of what a shuffled convolution puts out."""

    def __init__(self, function: Function, *, last: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.grouped, self.function = dense(), shuffled(), function
        self.last = last or dense()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.function(self.grouped(self.first(images))))
        return output


def split_by_positions(features: torch.Tensor) -> torch.Tensor:
    top, bottom = torch.split(features, 4, dim=-2)
    return top * bottom.sigmoid()


FREE_FUNCTIONS: dict[str, Function] = {
    "softmax over positions": lambda features: functional.softmax(features, dim=-1),
    "axis put in and taken out": lambda features: features.unsqueeze(-1).relu().squeeze(4),
    "axis put in before": lambda features: torch.unsqueeze(features, 1).mean(1),
    "axis put in behind": lambda features: features.unsqueeze(4).mean(4),
    "split by positions": split_by_positions,
}
NATURAL_FUNCTIONS: dict[str, Function] = {
    "softmax over channels": lambda features: features.softmax(1),
    "squeeze of whatever is one": lambda features: features[:, :, :1].squeeze().unsqueeze(2),
    "parts as a list": lambda features: torch.cat(features.chunk(2, dim=1), dim=1),
    "every second channel": lambda features: torch.cat([features[:, ::2], features[:, 1::2]], dim=1),
    "no channel": lambda features: torch.cat([features[:, 16:], features[:, :]], dim=1),
    "list of parts reversed": lambda features: torch.cat(features.chunk(2, dim=1)[::-1], dim=1),
    "another precision": lambda features: features.type(torch.float32),
    "channels cut off": lambda features: functional.pad(features, (0, 0, 0, 0, -2, 2)),
    "channels reflected": lambda features: functional.pad(features, (1, 1, 1, 1, 0, 0), mode="reflect").flip(1),
}


@pytest.mark.parametrize("name", FREE_FUNCTIONS)
def test_shuffles_go_through_functions_that_treat_channels_alike(name: str) -> None:
    assert remaining(Functions(FREE_FUNCTIONS[name])) == 0


@pytest.mark.parametrize("name", NATURAL_FUNCTIONS)
def test_functions_that_look_at_the_order_get_the_natural_one(name: str) -> None:
    assert remaining(Functions(NATURAL_FUNCTIONS[name])) == 1


def test_channels_and_rows_as_one_axis_need_the_natural_order() -> None:
    assert remaining(Functions(lambda features: features.flatten(1, 2), last=nn.Conv1d(CHANNELS * 8, 4, 1))) == 1


# What is flat has an entry per channel and position.
FLAT = CHANNELS * 8 * 8
NATURAL_ONCE_FLAT: dict[str, tuple[Function, int]] = {
    "padded": (lambda features: functional.pad(features.flatten(1), (2, 3)), FLAT + 5),
    "concatenated": (lambda features: torch.cat([features.flatten(1), features.relu().flatten(1)], 1), 2 * FLAT),
}


@pytest.mark.parametrize("name", NATURAL_ONCE_FLAT)
def test_flat_channels_beside_other_entries_get_the_natural_order(name: str) -> None:
    function, width = NATURAL_ONCE_FLAT[name]
    assert remaining(Functions(function, last=nn.Linear(width, 5))) == 1


@pytest.mark.parametrize("build", [nn.BatchNorm1d, nn.PReLU])
def test_what_has_an_entry_for_every_flat_one_leaves_the_order_free(build: Callable[[int], nn.Module]) -> None:
    model = nn.Sequential(dense(), shuffled(), nn.Flatten(), build(FLAT), nn.Linear(FLAT, 5))
    assert remaining(model) == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda features: features.view(features.size(1), -1),
        lambda features: features.reshape(features.shape[1], -1),
    ],
)
def test_a_view_by_another_size_than_the_batchs_gets_the_natural_order(view: Function) -> None:
    model = Functions(view, last=nn.Linear(FLAT * len(IMAGES) // CHANNELS, 5)).eval()
    report = ss.fold_report(ss.fold(model, IMAGES))
    assert (report.untraced_reason, len(report.gathers)) == ("", 1)


class Reflected(nn.Module):
    """Padding by function."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return functional.pad(features, (2, 2), mode="reflect")


LENGTH = 6
NATURAL_BESIDE_LINEAR: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resized": (lambda: nn.Upsample(scale_factor=2), 2 * CHANNELS),
    "reflected": (lambda: nn.ReflectionPad1d(2), CHANNELS + 4),
    "reflected by function": (Reflected, CHANNELS + 4),
    "normed along the other axis": (lambda: nn.BatchNorm1d(LENGTH), CHANNELS),
}


@pytest.mark.parametrize("name", NATURAL_BESIDE_LINEAR)
def test_what_works_on_the_last_axis_or_the_second_gets_the_channels_of_linear_layers_in_natural_order(
    name: str,
) -> None:
    build, width = NATURAL_BESIDE_LINEAR[name]
    grouped = ShuffledGroupLinear(CHANNELS, CHANNELS, groups=GROUPS)
    grouped.out_inverse.copy_(torch.randperm(CHANNELS))
    model = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), grouped, build(), nn.Linear(width, 5))
    assert remaining(model, torch.randn(3, LENGTH, CHANNELS)) == 1


def test_a_gate_of_one_channel_leaves_the_others_free() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.grouped, self.gate, self.last = dense(), shuffled(), nn.Conv2d(CHANNELS, 1, 1), dense()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            gate = self.gate(images).sigmoid()
            output: torch.Tensor = self.last(self.grouped(self.first(images)) * gate)
            return output

    assert remaining(Gated()) == 0


def test_constants_beside_the_channels_are_channels_too() -> None:
    def padded(features: torch.Tensor) -> torch.Tensor:
        return functional.pad(features, (1, 0, 0, 0, 3, 5), value=0.5)

    assert remaining(Functions(padded, last=dense(3 + CHANNELS + 5))) == 0
    # Groups of the next layer run across the channels and the constants: that takes a gather.
    next_grouped = nn.Sequential(shuffled(3 + CHANNELS + 5), dense())
    assert remaining(Functions(padded, last=next_grouped)) == 1


class Split(nn.Module):
    """Channels go apart, through a layer each, and come together again."""

    def __init__(self, cut: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.first, self.cut = dense(), cut
        self.branches = nn.ModuleList([shuffled(4, 8), shuffled(12, 8)])
        self.last = dense()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        narrow, wide = self.cut(self.first(images))
        features = [self.branches[0](narrow), self.branches[1](functional.relu_(wide))]
        output: torch.Tensor = self.last(torch.cat(features, dim=1))
        return output


@pytest.mark.parametrize(
    "cut",
    [
        lambda features: features.split([4, 12], dim=1),
        lambda features: torch.split(features, [4, 12], dim=-3),
        lambda features: (features[:, :4], features[:, 4:]),
        lambda features: (features[:, :-12, ::2], features[:, -12:100, ::2]),
    ],
)
def test_parts_of_the_channels_have_orders_of_their_own(
    cut: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    assert remaining(Split(cut)) == 0


def first_and_others(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return parts[0], torch.cat(parts[1:], dim=1)


@pytest.mark.parametrize(
    ("cut", "num_gathers"),
    [
        # Groups of the next layer run across the parts.
        (lambda features: first_and_others(list(features.chunk(4, 1))), 1),
        (lambda features: first_and_others([*torch.chunk(features, chunks=4, dim=1)]), 1),
        (lambda features: [part.relu() for part in torch.split(features, [4, 12], 1)], 0),
        (lambda features: list(features.split((4, 12), dim=1)), 0),
    ],
)
def test_parts_of_the_channels_may_be_listed(
    cut: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], num_gathers: int
) -> None:
    assert remaining(Split(cut)) == num_gathers


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        # Five parts of 16 channels are four of 4.
        (lambda features: torch.cat(list(features.chunk(5, 1)), dim=1), "IndexError"),
        (lambda features: torch.cat(list(features.split(4, 1)), dim=1), "cannot be iterated"),
        (lambda features: torch.cat(list(features.chunk(2, 0)), dim=0), "cannot be iterated"),
    ],
)
def test_parts_whose_number_is_not_told_keep_a_network_from_being_traced(cut: Function, reason: str) -> None:
    model = Functions(cut).eval()
    folded = ss.fold(model, IMAGES)
    assert reason in ss.fold_report(folded).untraced_reason
    torch.testing.assert_close(folded(IMAGES), model(IMAGES))


def test_a_part_of_channels_in_natural_order_stays_in_it() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.grouped, self.last = dense(), shuffled(8, CHANNELS), dense()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            both = torch.cat([images, self.first(images)], dim=1)
            output: torch.Tensor = self.last(self.grouped(both.chunk(4, dim=1)[0]))
            return output

    assert remaining(Cut()) == 1


def test_writing_into_a_part_writes_into_the_whole() -> None:
    def changed(features: torch.Tensor) -> torch.Tensor:
        features.chunk(4, dim=1)[1].mul_(2)
        return features

    model = Functions(changed)
    model.first, model.grouped = shuffled(), dense()  # type: ignore[assignment]  # the other way round
    assert remaining(model) == 1


def test_a_part_joined_with_the_whole_of_another_tensor_divides_that_too() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.one = nn.Conv2d(CHANNELS, 2 * CHANNELS, 1), shuffled()
            self.last = dense(2 * CHANNELS)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            features = self.both(images)
            first, second = features.chunk(2, dim=1)
            gated = torch.cat([first * self.one(second).sigmoid(), second], dim=1)
            output: torch.Tensor = self.last(gated + features)
            return output

    # Both sides of the grouped layer find their own half of what the dense one puts out.
    assert remaining(Halves()) == 0


def test_the_streams_of_a_network_with_padded_shortcuts_are_free() -> None:
    model = CifarResNet(20)
    plan = ss.GroupingPlan(
        {
            layer.name: ss.LayerPlan(
                group_level=3,
                out_perm=torch.randperm(layer.weight_shape[0]).numpy(),
                in_perm=torch.randperm(layer.weight_shape[1]).numpy(),
                weight_shape=layer.weight_shape,
            )
            for layer in ss.select_layers(model).layers
            if layer.name == "layer1.0.conv1"
        }
    )
    assert remaining(ss.convert_(model, plan), torch.randn(1, 3, 32, 32)) == 0


def test_a_norm_with_an_activation_folds_and_lets_shuffles_through() -> None:
    model = nn.Sequential(dense(), BatchNormAct2d(CHANNELS), shuffled(), BatchNormAct2d(CHANNELS), dense())
    assert remaining(model) == 0
    report = ss.fold_report(ss.fold(model, IMAGES))
    assert report.num_kept_batch_norms == 0


def test_the_norms_of_a_timm_network_fold() -> None:
    model = timm.create_model("efficientnet_lite0", pretrained=False).eval()
    folded = ss.fold(model, torch.randn(1, 3, 64, 64))
    assert ss.fold_report(folded).untraced_reason == ""
    assert ss.fold_report(folded).num_kept_batch_norms == 0
    assert not any(node.target is functional.batch_norm for node in folded.graph.nodes)
