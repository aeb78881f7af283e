"""Which layers of small networks see the same channels, and which of those get one order."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from data_parallel import parallel
from torch import nn
from torch.nn import functional

from strucspars.channels.sharing import (
    LayerSides,
    NetworkChannels,
    OrderSharing,
    UntraceableNetwork,
    network_channels,
    one_shuffle,
    share_streams,
)

IMAGES = torch.zeros(2, 3, 8, 8)


class Network(nn.Module):
    """Named layers, and what a function does with them."""

    def __init__(self, function: Callable[["Network", torch.Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    # Its layers are all modules, not tensors.
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, images: torch.Tensor) -> Any:
        return self.function(self, images)


def conv(in_channels: int, out_channels: int, *, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 1, groups=groups)


def residual() -> Network:
    def function(net: Network, images: torch.Tensor) -> Any:
        features = net.norm(net.stem(images)).relu()
        features = features + net.second(net.first(features).relu())
        return net.head(features.mean((2, 3)))

    head = nn.Linear(8, 5)
    return Network(function, stem=conv(3, 8), norm=nn.BatchNorm2d(8), first=conv(8, 8), second=conv(8, 8), head=head)


def bottleneck(middle: int = 4, stride: int = 1) -> Network:
    """Two blocks: norm and activation before each convolution, as before or after."""

    def function(net: Network, images: torch.Tensor) -> Any:
        features = net.stem(images)
        inner = net.reduce(net.norm(features).relu())
        inner = net.expand(net.spatial(inner.relu()).relu())
        return net.head(functional.max_pool2d(features, net.spatial.stride) + inner)

    return Network(
        function,
        stem=conv(3, 8),
        norm=nn.BatchNorm2d(8),
        reduce=conv(8, 4),
        spatial=nn.Conv2d(4, middle, 3, stride=stride, padding=1),
        expand=conv(middle, 8),
        head=conv(8, 5),
    )


def concatenation() -> Network:
    def function(net: Network, images: torch.Tensor) -> Any:
        first = net.stem(images)
        second = net.second(first)
        third = net.third(torch.cat([first, second], 1))
        return net.head(torch.cat([first, second, third], 1))

    return Network(function, stem=conv(3, 8), second=conv(8, 4), third=conv(12, 6), head=conv(18, 5))


def squeeze_excitation() -> Network:
    def function(net: Network, images: torch.Tensor) -> Any:
        features = net.depthwise(net.stem(images))
        gate = net.excite(net.squeeze(features.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return net.head(features * gate)

    depthwise = nn.Conv2d(8, 8, 3, groups=8)
    squeeze, excite = conv(8, 4), conv(4, 8)
    return Network(function, stem=conv(3, 8), depthwise=depthwise, squeeze=squeeze, excite=excite, head=conv(8, 5))


def called_twice() -> Network:
    def function(net: Network, images: torch.Tensor) -> Any:
        return net.head(net.block(net.block(net.stem(images)).relu()))

    return Network(function, stem=conv(3, 8), block=conv(8, 8), head=conv(8, 5))


def split() -> Network:
    def function(net: Network, images: torch.Tensor) -> Any:
        left, right = net.stem(images).split([4, 8], dim=1)
        return net.head(torch.cat([net.left(left), right], 1))

    return Network(function, stem=conv(3, 12), left=conv(4, 6), head=conv(14, 5))


def u_net() -> Network:
    def function(net: Network, images: torch.Tensor) -> Any:
        features = net.stem(images)
        low = net.third(net.second(net.down(features)))
        return net.head(torch.cat([functional.interpolate(low, scale_factor=2), features], 1))

    down = nn.Conv2d(8, 16, 2, stride=2)
    return Network(function, stem=conv(3, 8), down=down, second=conv(16, 16), third=conv(16, 8), head=conv(16, 5))


def flattened() -> Network:
    layers: dict[str, nn.Module] = {"stem": conv(3, 8), "hidden": nn.Linear(8 * 8 * 8, 16), "head": nn.Linear(16, 5)}
    return Network(lambda net, images: net.head(net.hidden(net.stem(images).flatten(1)).relu()), **layers)


def beside_images() -> Network:
    return Network(
        lambda net, images: net.head(torch.cat([images, net.stem(images)], 1)), stem=conv(3, 8), head=conv(11, 5)
    )


def grouped_already() -> Network:
    def function(net: Network, images: torch.Tensor) -> Any:
        return net.head(net.grouped(net.stem(images)))

    return Network(function, stem=conv(3, 8), grouped=conv(8, 8, groups=2), head=conv(8, 5))


# The classes with their writers and readers, besides the images before "stem" and the scores after "head".
FOUND: dict[str, tuple[Callable[[], Network], dict[str, tuple[str, str]]]] = {
    "residual": (residual, {"stem": ("stem second", "first head"), "first": ("first", "second")}),
    "bottleneck": (
        bottleneck,
        {
            "stem": ("stem expand", "reduce head"),
            "reduce": ("reduce", "spatial"),
            "spatial": ("spatial", "expand"),
        },
    ),
    "concatenation": (
        concatenation,
        {"stem": ("stem", "second third head"), "second": ("second", "third head"), "third": ("third", "head")},
    ),
    "squeeze-excitation": (
        squeeze_excitation,
        {"stem": ("stem excite", "squeeze head"), "squeeze": ("squeeze", "excite")},
    ),
    "called twice": (called_twice, {"stem": ("stem block", "block head")}),
    "split": (split, {"stem": ("stem", "left"), "stem#2": ("stem", "head"), "left": ("left", "head")}),
    "u-net": (
        u_net,
        {
            "stem": ("stem", "down head"),
            "down": ("down", "second"),
            "second": ("second", "third"),
            "third": ("third", "head"),
        },
    ),
    "flattened": (flattened, {"stem": ("stem", "hidden"), "hidden": ("hidden", "head")}),
    "beside images": (beside_images, {"head.input": ("", "head"), "stem": ("stem", "head")}),
    "grouped already": (grouped_already, {"stem": ("stem", "grouped"), "grouped": ("grouped", "head")}),
}
# What `share_streams` shares, and what `one_shuffle` shares in addition.
SHARED: dict[str, tuple[Callable[[], Network], set[str], set[str]]] = {
    "residual": (residual, {"stem"}, set()),
    "bottleneck": (bottleneck, {"stem"}, {"reduce"}),
    "bottleneck with stride": (lambda: bottleneck(stride=2), {"stem"}, {"reduce"}),
    "bottleneck that widens": (lambda: bottleneck(middle=16), {"stem"}, {"spatial"}),
    "concatenation": (concatenation, {"stem", "second", "third"}, set()),
    "squeeze-excitation": (squeeze_excitation, {"stem"}, set()),
    "called twice": (called_twice, {"stem"}, set()),
    "split": (split, {"stem", "stem#2", "left"}, set()),
    "u-net": (u_net, {"stem", "third"}, {"down"}),
    # From the images to the scores.
    "flattened": (flattened, set(), set()),
    "beside images": (beside_images, {"stem"}, set()),
    "grouped already": (grouped_already, set(), set()),
}


def found_in(model: nn.Module) -> NetworkChannels:
    return network_channels(model, IMAGES)


@pytest.mark.parametrize("name", FOUND)
def test_layers_that_see_the_same_channels_are_in_one_class(name: str) -> None:
    build, expected = FOUND[name]
    classes = found_in(build()).classes
    assert {
        name: (" ".join(each.writers), " ".join(each.readers))
        for name, each in classes.items()
        if name not in ("stem.input", "head")
    } == expected
    assert classes["stem.input"].is_fixed
    assert classes["head"].is_fixed
    assert [each.name for each in classes.values()] == list(classes)


@pytest.mark.parametrize("name", SHARED)
def test_policies_share_streams_and_all_but_the_smallest_class_between_them(name: str) -> None:
    build, streams, others = SHARED[name]
    channels = found_in(build())
    assert share_streams(channels) == OrderSharing(frozenset(streams))
    assert one_shuffle(channels) == OrderSharing(frozenset(streams | others))


def test_the_sides_of_a_layer_list_the_classes_along_its_channels() -> None:
    sides = found_in(concatenation()).sides
    assert list(sides) == ["stem", "second", "third", "head"]
    assert sides["third"] == LayerSides(outputs=("third",), inputs=("stem", "second"))
    assert found_in(split()).sides["stem"].outputs == ("stem", "stem#2")


@pytest.mark.parametrize(
    ("build", "layer", "sides"),
    [
        (residual, "stem", LayerSides(outputs=("stem",))),
        (residual, "head", LayerSides(inputs=("stem",))),
        (squeeze_excitation, "depthwise", LayerSides()),
        (flattened, "hidden", LayerSides(outputs=("hidden",))),
        (grouped_already, "grouped", LayerSides()),
        (grouped_already, "stem", LayerSides()),
    ],
)
def test_a_side_without_an_order_to_share_has_no_classes(
    build: Callable[[], Network], layer: str, sides: LayerSides
) -> None:
    assert found_in(build()).sides[layer] == sides


def test_fixed_channels_beside_others_stay_in_the_list_of_a_side() -> None:
    channels = found_in(beside_images())
    assert channels.sides["head"].inputs == ("head.input", "stem")
    assert [name for name, each in channels.classes.items() if each.is_fixed] == ["stem.input", "head.input", "head"]


def test_the_bytes_of_a_class_are_those_of_its_largest_tensor_and_a_part_has_its_share() -> None:
    images, floats = len(IMAGES), 4
    classes = found_in(u_net()).classes
    assert classes["down"].num_bytes == images * 16 * 4 * 4 * floats
    # Written at half the size that "head" reads.
    assert classes["third"].num_bytes == images * 8 * 8 * 8 * floats
    assert classes["stem"].num_bytes == images * 8 * 8 * 8 * floats
    assert {name for name, each in classes.items() if each.is_part} == {"stem", "third"}


def test_widths_of_parts_add_up_to_those_of_their_layer() -> None:
    classes = found_in(split()).classes
    assert (classes["stem"].width, classes["stem#2"].width) == (4, 8)


def test_names_are_those_without_wrappers_and_the_model_does_not_change() -> None:
    model = bottleneck()
    expected = found_in(model)
    model.spatial = parallel(cast(nn.Module, model.spatial))
    wrapped = cast(nn.Module, torch.compile(parallel(model)))
    wrapped.train()
    before = copy.deepcopy(model.state_dict())
    assert network_channels(wrapped, IMAGES) == expected
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_network_that_is_a_single_layer_has_no_name_for_it() -> None:
    channels = found_in(conv(3, 8))
    assert dict(channels.sides) == {"": LayerSides()}


class Branching(nn.Module):
    """Decides by what it sees."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features if features.mean() > 0 else -features  # where tracing stops


def test_a_network_that_cannot_be_traced_is_told_by_module_and_line_with_a_remedy() -> None:
    model = nn.Sequential(conv(3, 8), nn.Sequential(nn.ReLU(), Branching()))
    with pytest.raises(UntraceableNetwork) as raised:
        found_in(model)
    with open(__file__) as source:
        line = 1 + [text.rstrip().endswith("# where tracing stops") for text in source].index(True)
    message = str(raised.value)
    assert message.startswith(f"tracing stopped in 1.1 (Branching), {__file__}:{line} (TraceError: ")
    assert message.endswith("strucspars.channels.register_channel_rule")


def test_inputs_that_do_not_fit_raise_the_error_of_the_network() -> None:
    with pytest.raises(RuntimeError, match="expected input"):
        network_channels(residual(), torch.zeros(1, 5, 8, 8))
