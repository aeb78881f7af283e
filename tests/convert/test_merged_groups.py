"""Narrow groups that run together: the same function to the last bit of the mathematics, and less to gather."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.convert.fold import merge_groups_, wide_enough_groups, widen_groups_
from strucspars.cost.counting import BeforeAfter
from strucspars.cost.gathers import FoldReport, WidenedLayer
from strucspars.models.cifar import CifarResNet
from strucspars.nn.layers import ShuffledGroupConv1d, ShuffledGroupLinear, merged_weight

CHANNELS = 16
IMAGES = torch.randn(2, CHANNELS, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def with_random_orders(layer: nn.Module) -> nn.Module:
    for name in ("in_perm", "out_inverse"):
        order = getattr(layer, name)
        order.copy_(torch.randperm(len(order)))
    return layer


def shuffled(in_channels: int = CHANNELS, out_channels: int = CHANNELS, *, groups: int = 8) -> nn.Module:
    return with_random_orders(ss.ShuffledGroupConv2d(in_channels, out_channels, 3, padding=1, groups=groups))


def dense() -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, 1)


@given(st.integers(1, 24), st.integers(1, 8), st.integers(1, 20))
def test_groups_are_made_of_whole_ones_and_as_many_as_are_wide_enough(groups: int, width: int, wanted: int) -> None:
    merged = wide_enough_groups(groups, groups * width, wanted)
    by_trying = [count for count in range(1, groups + 1) if groups % count == 0 and groups // count * width >= wanted]
    assert merged == max(by_trying, default=1)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_the_merged_weight_connects_what_was_connected_and_nothing_else(
    merged_groups: int, together: int, out_width: int, in_width: int
) -> None:
    groups = merged_groups * together
    weight = torch.rand(groups * out_width, in_width, 3) + 1
    merged = merged_weight(weight, groups, merged_groups)
    assert merged.shape == (groups * out_width, together * in_width, 3)
    assert merged.count_nonzero() == weight.numel()
    signals = torch.randn(2, groups * in_width, 5)
    torch.testing.assert_close(
        functional.conv1d(signals, merged, groups=merged_groups), functional.conv1d(signals, weight, groups=groups)
    )


def test_the_merged_weight_keeps_its_memory_format_and_precision() -> None:
    weight = torch.randn(8, 2, 3, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    merged = merged_weight(weight, 4, 2)
    assert merged.dtype == torch.bfloat16
    assert merged.is_contiguous(memory_format=torch.channels_last)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], type[nn.Module]]] = {
    "ours": (shuffled, (CHANNELS, 6, 6), nn.Conv2d),
    "ours without bias": (lambda: ss.ShuffledGroupConv2d(8, 16, 1, groups=8, bias=False), (8, 6, 6), nn.Conv2d),
    "ours over signals": (lambda: with_random_orders(ShuffledGroupConv1d(8, 16, 3, groups=8)), (8, 6), nn.Conv1d),
    "ours, linear": (lambda: with_random_orders(ShuffledGroupLinear(16, 24, groups=8)), (16,), nn.Linear),
    "the network's own": (
        lambda: nn.Conv2d(16, 32, 3, groups=8, padding_mode="reflect", padding=1),
        (16, 6, 6),
        nn.Conv2d,
    ),
}


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_merged_groups_computes_the_same(name: str, groups: int) -> None:
    build, shape, dense_type = LAYERS[name]
    layer, inputs = build(), torch.randn(3, *shape)
    type_before = type(layer)
    with torch.no_grad():
        expected = layer(inputs)
        merge_groups_(layer, groups)
        torch.testing.assert_close(layer(inputs), expected)
    # With one group left there is nothing to shuffle: any order of the neighbours goes into the weight.
    assert type(layer) is (dense_type if groups == 1 else type_before)
    if groups == 1:
        assert set(layer.state_dict()) <= {"weight", "bias"}
        assert vars(layer).keys() - {"groups"} == vars(dense_type(1, 1, *[1] * (len(shape) > 1))).keys() - {"groups"}


def widened(model: nn.Module, widen_groups_below: int) -> list[tuple[str, int, int]]:
    layers = widen_groups_(model, [name for name, _ in model.named_modules()], widen_groups_below=widen_groups_below)
    return [(layer.layer, layer.groups.before, layer.groups.after) for layer in layers]


def test_only_narrow_groups_that_are_not_depthwise_are_widened() -> None:
    model = nn.Sequential(
        shuffled(groups=8),
        shuffled(groups=4),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.Conv2d(16, 32, 3, groups=16),
        nn.Conv2d(16, 48, 3, groups=8),
        nn.Conv2d(48, 12, 3, groups=6),
        nn.ConvTranspose2d(12, 12, 3, groups=6),
        nn.Linear(12, 12),
    )
    # The narrower side counts: 12 channels of 48 x 12 in 6 groups are 2 each.
    assert widened(model, 4) == [("0", 8, 4), ("4", 8, 4), ("5", 6, 3)]


class OtherTensor(torch.Tensor):
    """Stands for the weights of quantisation libraries, which are tensors of their own classes."""


def test_a_layer_with_a_hook_or_a_weight_that_is_no_plain_one_stays_narrow() -> None:
    hooked, normed = shuffled(), nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 1, groups=8))
    hooked.register_forward_hook(lambda module, inputs, outputs: outputs)
    quantised = nn.Conv2d(16, 16, 1, groups=8)
    quantised.weight = nn.Parameter(torch.randn(16, 2, 1, 1).as_subclass(OtherTensor))
    assert widened(nn.Sequential(hooked, normed, quantised), 16) == []


def test_two_layers_that_share_a_weight_are_both_widened() -> None:
    one, other = nn.Conv2d(16, 16, 1, groups=8), nn.Conv2d(16, 16, 1, groups=8)
    other.weight = one.weight
    model = nn.Sequential(one, other)
    with torch.no_grad():
        expected = model(IMAGES)
        assert widened(model, 4) == [("0", 8, 4), ("1", 8, 4)]
        torch.testing.assert_close(model(IMAGES), expected)


def folded_equal(model: nn.Module, images: torch.Tensor, widen_groups_below: int) -> FoldReport:
    """The network folded with wide groups computes the same; no group is narrower but in depthwise layers."""
    folded = ss.fold(model, images, widen_groups_below=widen_groups_below)
    report = ss.fold_report(folded)
    assert report.untraced_reason == ""
    with torch.no_grad():
        expected = model.eval()(images)
        torch.testing.assert_close(folded(images), expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    for module in folded.modules():
        if isinstance(module, nn.Conv2d) and module.groups not in (1, module.in_channels):
            assert min(module.in_channels, module.out_channels) // module.groups >= widen_groups_below
    return report


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([4, 8, 16, 24]), min_size=2, max_size=4),
    st.lists(st.sampled_from([1, 2, 4]), min_size=4, max_size=4),
    st.integers(1, 30),
    st.integers(0, 100),
)
def test_any_chain_of_grouped_layers_keeps_its_function(
    widths: list[int], groups: list[int], widen_groups_below: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs, number in zip(widths, widths[1:], groups, strict=False):
        own = nn.Conv2d(inputs, outputs, 1, groups=number)
        layers += [
            own if seed % 3 == 0 else shuffled(inputs, outputs, groups=number),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    model = nn.Sequential(*layers).double()
    folded_equal(model, torch.randn(2, widths[0], 4, 4, dtype=torch.float64), widen_groups_below)


def test_a_layer_that_is_left_with_one_group_takes_in_all_shuffles_around_it() -> None:
    model = nn.Sequential(
        dense(), shuffled(groups=4), nn.ReLU(), shuffled(groups=8), nn.ReLU(), shuffled(groups=4), dense()
    )
    assert len(folded_equal(model, IMAGES, 1).gathers) == 2
    # 4 channels are enough for the outer two; then 16 are, for all.
    report = folded_equal(model, IMAGES, 4)
    assert report.widened == (WidenedLayer(layer="3", groups=BeforeAfter(8, 4)),)
    assert len(report.gathers) == 2
    report = folded_equal(model, IMAGES, 5)
    assert [layer.groups.after for layer in report.widened] == [2, 2, 2]
    report = folded_equal(model, IMAGES, 16)
    assert [layer.groups.after for layer in report.widened] == [1, 1, 1]
    assert report.gathers == ()


def test_a_dense_layer_between_grouped_ones_costs_no_gather() -> None:
    narrow = shuffled(groups=16)
    model = nn.Sequential(dense(), shuffled(CHANNELS, 64, groups=4), shuffled(64, CHANNELS, groups=2), narrow, dense())
    before, after = (len(folded_equal(model, IMAGES, width).gathers) for width in (1, 4))
    assert (before, after) == (2, 2)
    assert len(folded_equal(model, IMAGES, 9).gathers) == 0


def test_the_users_model_stays_as_it_is() -> None:
    model = nn.Sequential(shuffled(), nn.Conv2d(CHANNELS, CHANNELS, 1, groups=8))
    before = copy.deepcopy(model.state_dict())
    ss.fold(model, IMAGES, widen_groups_below=8)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [type(module) for module in model] == [ss.ShuffledGroupConv2d, nn.Conv2d]
    assert [module.groups for module in model] == [8, 8]


def test_a_layer_that_is_called_twice_is_widened_for_each_call() -> None:
    layer = shuffled()
    report = folded_equal(nn.Sequential(dense(), layer, nn.ReLU(), layer, dense()), IMAGES, 4)
    assert [change.groups for change in report.widened] == [BeforeAfter(8, 4)] * 2


def test_a_weight_that_is_also_read_directly_is_not_the_one_that_changes() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1, groups=8)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return functional.conv2d(self.conv(images), self.conv.weight, groups=8)

    assert len(folded_equal(Tied(), IMAGES, 4).widened) == 1


def test_a_network_that_cannot_be_traced_keeps_its_groups() -> None:
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped = shuffled()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            features: torch.Tensor = self.grouped(images)
            return features if features.mean() > 0 else -features

    model = Untraceable().eval()
    folded = ss.fold(model, IMAGES, widen_groups_below=4)
    report = ss.fold_report(folded)
    assert "TraceError" in report.untraced_reason
    assert report.widened == ()
    torch.testing.assert_close(folded(-IMAGES), model(-IMAGES))


@pytest.mark.parametrize("value", [0, -4, 1.5, True, "16"])
def test_a_width_that_is_none_is_refused_by_name_and_value(value: int) -> None:
    with pytest.raises(ValueError, match=r"widen_groups_below must be a whole number from 1 on, got") as refused:
        ss.fold(dense(), IMAGES, widen_groups_below=value)
    assert repr(value) in str(refused.value)


def test_the_report_names_what_was_widened() -> None:
    report = folded_equal(nn.Sequential(dense(), shuffled(), dense()), IMAGES, 4)
    assert str(report).splitlines() == [
        "no gathers remain",
        "",
        "layer  groups",
        "-------------",
        "1      8 -> 4",
        "1 layer runs with wider groups",
    ]


def grouped_throughout(model: nn.Module) -> nn.Module:
    """Every layer at its largest level up to 16 groups, in random orders; random scales and statistics."""
    generator = np.random.default_rng(0)
    layers = {}
    for selected in ss.select_layers(model).layers:
        out_channels, in_channels = selected.weight_shape[:2]
        layers[selected.name] = ss.LayerPlan(
            group_level=min(5, ss.core.max_group_level(out_channels, in_channels)),
            out_perm=generator.permutation(out_channels),
            in_perm=generator.permutation(in_channels),
            weight_shape=selected.weight_shape,
        )
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.5, 1.5)
    return ss.convert_(model, ss.GroupingPlan(layers))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "cifar_resnet": lambda: CifarResNet(20),
    "resnet18": lambda: torchvision.models.resnet18(weights=None),
    "shufflenet": lambda: torchvision.models.shufflenet_v2_x0_5(weights=None),
    "regnet": lambda: torchvision.models.regnet_y_400mf(weights=None),
    "mobilenet": lambda: torchvision.models.mobilenet_v2(weights=None),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_grouped_throughout_keep_their_function_and_gather_no_more(name: str) -> None:
    model, images = grouped_throughout(NETWORKS[name]()), torch.randn(2, 3, 32, 32)
    wide, narrow = folded_equal(model, images, 16), folded_equal(model, images, 1)
    assert wide.widened
    assert narrow.widened == ()
    assert len(wide.gathers) <= len(narrow.gathers)
