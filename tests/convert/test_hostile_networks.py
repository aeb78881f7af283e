"""Networks that make it hard: orders that are looked at, tensors that change under others' hands, code that resists."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import strucspars as ss

CHANNELS, GROUPS = 16, 4
IMAGES = torch.randn(3, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def shuffled(*, groups: int = GROUPS) -> ss.ShuffledGroupConv2d:
    layer = ss.ShuffledGroupConv2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups)
    layer.in_perm.copy_(torch.randperm(CHANNELS))
    layer.out_inverse.copy_(torch.randperm(CHANNELS))
    return layer


class Network(nn.Module):
    """Layers of both kinds, and a function that puts them together."""

    def __init__(self, forward: "Callable[[Network, torch.Tensor], Any]") -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.wide_last = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)
        self.one, self.other = shuffled(), shuffled(groups=8)
        self.norm, self.wide_norm = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(2 * CHANNELS)
        self.together = forward

    def forward(self, images: torch.Tensor) -> Any:
        return self.together(self, images)


ORDER = torch.randperm(CHANNELS, generator=torch.Generator().manual_seed(2)).tolist()


def permuted_skip(net: Network, images: torch.Tensor) -> Any:
    stream = net.first(images)
    stream = stream[:, ORDER] + net.one(stream)
    return net.last(functional.relu(stream.flip(1) + net.other(stream)))


def skip_in_its_own_channel_shuffle(net: Network, images: torch.Tensor) -> Any:
    stream = net.first(images)
    mixed = stream.view(stream.size(0), 4, 4, 8, 8).transpose(1, 2).reshape(stream.shape)
    return net.last(net.other(mixed + net.one(stream)) + mixed)


def concatenations_crosswise(net: Network, images: torch.Tensor) -> Any:
    stream = net.first(images)
    one, other = net.one(stream), net.other(stream)
    crosswise = torch.cat([one, other], dim=1) + torch.cat([other, one], dim=1)
    return net.wide_last(functional.relu(net.wide_norm(crosswise)))


def concatenated_with_itself(net: Network, images: torch.Tensor) -> Any:
    one = net.one(net.first(images))
    return net.wide_last(net.wide_norm(torch.cat([one, one], dim=1)) + torch.cat([one, net.other(one)], dim=1))


def shared_by_two_streams(net: Network, images: torch.Tensor) -> Any:
    stream = net.first(images)
    return net.last(net.norm(net.one(stream)) + net.one(net.other(stream)) + net.norm(stream))


def shared_and_looked_at(net: Network, images: torch.Tensor) -> Any:
    once = net.one(net.first(images))
    return net.last(net.norm(once) * once.cumsum(1) + net.norm(net.one(once)))


def relu_in_place_behind_the_skip(net: Network, images: torch.Tensor) -> Any:
    stream = net.first(images)
    branch = net.one(stream)
    functional.relu(stream, inplace=True)
    return net.last(net.other(branch) + stream)


def added_in_place_to_what_was_read(net: Network, images: torch.Tensor) -> Any:
    stream = net.first(images)
    one = net.one(stream)
    stream += one
    one.add_(stream, alpha=0.5)
    other = net.other(stream)
    other += one
    return net.last(other)


def added_into_a_slice(net: Network, images: torch.Tensor) -> Any:
    stream = net.one(net.first(images))
    stream[:, :, 1:].add_(net.other(stream)[:, :, :-1])
    return net.last(stream)


def written_into_the_images(net: Network, images: torch.Tensor) -> Any:
    features = net.one(images)
    images += features
    return net.other(images)


def norm_of_what_changes(net: Network, images: torch.Tensor) -> Any:
    features = net.one(net.first(images))
    normed = net.norm(features)
    features.mul_(2)
    return net.last(normed + features)


def several_outputs(net: Network, images: torch.Tensor) -> Any:
    one = net.one(net.first(images))
    return {"features": one, "pair": (net.other(one), [one.mean((2, 3))])}


HOSTILE = (
    permuted_skip,
    skip_in_its_own_channel_shuffle,
    concatenations_crosswise,
    concatenated_with_itself,
    shared_by_two_streams,
    shared_and_looked_at,
    relu_in_place_behind_the_skip,
    added_in_place_to_what_was_read,
    added_into_a_slice,
    written_into_the_images,
    norm_of_what_changes,
    several_outputs,
)


def randomised(model: nn.Module) -> nn.Module:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.5, 1.5)
    return model.eval()


def assert_equal(folded: nn.Module, model: nn.Module, images: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(folded(images.clone()), model(images.clone()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("widen_groups_below", [1, 4, 16])
@pytest.mark.parametrize("forward", HOSTILE, ids=lambda forward: forward.__name__)
def test_the_function_stays(forward: Callable[[Network, torch.Tensor], Any], widen_groups_below: int) -> None:
    model = randomised(Network(forward))
    folded = ss.fold(model, IMAGES, widen_groups_below=widen_groups_below)
    assert ss.fold_report(folded).untraced_reason == ""
    assert_equal(folded, model, IMAGES)
    assert_equal(folded, model, torch.randn(5, CHANNELS, 8, 8))


def test_layers_that_share_their_parameters_keep_an_order_each() -> None:
    model = Network(lambda net, images: net.last(net.other(net.one(net.first(images)))))
    model.other = shuffled()
    model.other.weight, model.other.bias = model.one.weight, model.one.bias
    model.last.weight = model.first.weight
    folded = ss.fold(randomised(model), IMAGES, widen_groups_below=8)
    assert ss.fold_report(folded).untraced_reason == ""
    assert_equal(folded, model, IMAGES)


def test_two_inputs_may_come_in_the_same_tensor() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = shuffled(), shuffled()

        def forward(self, images: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.one(images) + self.other(others)
            return output

    model = Two().eval()
    folded = ss.fold(model, (IMAGES, IMAGES))
    torch.testing.assert_close(folded(IMAGES, 2 * IMAGES), model(IMAGES, 2 * IMAGES))


class WritingIntoItsBatch(nn.Module):
    """Changes the images in the dictionary and in the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = shuffled(), shuffled()

    def forward(self, batch: dict[str, torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
        batch["images"].mul_(2)
        others[0].add_(batch["images"])
        output: torch.Tensor = self.one(batch["images"]) + self.other(others[0])
        return output


def test_inputs_that_are_written_into_stay_as_they_are() -> None:
    model = WritingIntoItsBatch().eval()

    def inputs() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        return {"images": IMAGES.clone()}, [IMAGES + 1]

    given = inputs()
    folded = ss.fold(model, given)
    torch.testing.assert_close(given, inputs(), rtol=0, atol=0)
    assert ss.fold_report(folded).untraced_reason == ""
    torch.testing.assert_close(folded(*inputs()), model(*inputs()).detach(), rtol=1e-4, atol=1e-5)


def loops_over_data(net: Network, images: torch.Tensor) -> Any:
    features = net.one(images)
    while features.abs().max() > 1:
        features = features / 2
    return net.norm(net.other(features))


def writes_by_index(net: Network, images: torch.Tensor) -> Any:
    features = net.one(images)
    features[:, :, 1:] += net.other(features)[:, :, :-1]
    return features


def counts_by_length(net: Network, images: torch.Tensor) -> Any:
    return net.other(net.one(images)) * len(images)


def asks_for_items(net: Network, images: torch.Tensor) -> Any:
    return net.one(images) * float(images.sum().item())


def fails_on_stand_ins(net: Network, images: torch.Tensor) -> Any:
    if not isinstance(images, torch.Tensor):
        raise SystemError("give tensors\nand nothing else")
    return net.one(images)


@pytest.mark.parametrize(
    "forward", [loops_over_data, writes_by_index, counts_by_length, asks_for_items, fails_on_stand_ins]
)
def test_code_that_cannot_be_traced_keeps_its_function_and_its_shuffles(
    forward: Callable[[Network, torch.Tensor], Any],
) -> None:
    model = randomised(Network(forward))
    folded = ss.fold(model, IMAGES)
    report = ss.fold_report(folded)
    assert report.untraced_reason
    assert "\n" not in report.untraced_reason
    assert {gather.layer for gather in report.gathers} <= {"one", "other"}
    assert len(report.gathers) >= 2
    assert_equal(folded, model, IMAGES)
    assert_equal(folded, model, torch.randn(5, CHANNELS, 8, 8))


def test_what_a_graph_only_reads_of_a_layer_is_no_layer() -> None:
    def tied(net: Network, images: torch.Tensor) -> Any:
        return functional.conv2d(net.last(net.one(net.first(images))), net.last.weight)

    model = randomised(Network(tied))
    folded = ss.fold(model, IMAGES)
    assert_equal(folded, model, IMAGES)
    assert sum(isinstance(module, nn.Conv2d) for module in folded.modules()) == 3
    assert "Conv2d" in repr(folded)
    assert len(ss.summary(folded, IMAGES).rows) == 3
