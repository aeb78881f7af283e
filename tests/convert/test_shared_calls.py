"""Modules that are called several times: weights are there once wherever one form of them serves all calls."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import strucspars as ss
from strucspars.convert import reordering

CHANNELS = 16
IMAGES = torch.randn(2, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def shuffled(*, groups: int = 4) -> ss.ShuffledGroupConv2d:
    layer = ss.ShuffledGroupConv2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups, bias=False)
    layer.in_perm.copy_(torch.randperm(CHANNELS))
    layer.out_inverse.copy_(torch.randperm(CHANNELS))
    return layer


def dense() -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, 1)


class Network(nn.Module):
    """An encoder, layers that may follow it, and a function that puts them together."""

    def __init__(self, forward: "Callable[[Network, torch.Tensor], Any]") -> None:
        super().__init__()
        norm = nn.BatchNorm2d(CHANNELS)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        self.encoder = nn.Sequential(dense(), shuffled(), norm, nn.ReLU(), shuffled(), nn.ReLU(), dense())
        self.head, self.other_head, self.norm = shuffled(), shuffled(groups=2), nn.BatchNorm2d(CHANNELS)
        self.together = forward

    def forward(self, images: torch.Tensor) -> Any:
        return self.together(self, images)


def four_views(net: Network, images: torch.Tensor) -> Any:
    return [net.encoder(view) for view in (images, images.flip(2), images + 1, images[:, :, ::2])]


def pyramid(net: Network, images: torch.Tensor) -> Any:
    return [net.encoder(functional.avg_pool2d(images, size)) for size in (1, 2, 4)]


def two_heads(net: Network, images: torch.Tensor) -> Any:
    return net.head(net.encoder(images)), net.other_head(net.encoder(images + 1))


def two_heads_on_groups(net: Network, images: torch.Tensor) -> Any:
    views = [images, images + 1]
    for layer in list(net.encoder)[:-1]:
        views = [layer(view) for view in views]
    return net.head(views[0]), net.other_head(views[1])


def recurrent(net: Network, images: torch.Tensor) -> Any:
    stream = net.encoder(images)
    for _ in range(3):
        stream = stream + net.other_head(functional.relu(net.head(stream)))
    return stream


def norm_after_one_call(net: Network, images: torch.Tensor) -> Any:
    return net.norm(net.head(images)) + net.head(images + 1).cumsum(1)


SHARING = (four_views, pyramid, two_heads, two_heads_on_groups, recurrent, norm_after_one_call)


def folded_equal(model: nn.Module, **options: int) -> fx.GraphModule:
    model.eval()
    folded = ss.fold(model, IMAGES, **options)
    assert ss.fold_report(folded).untraced_reason == ""
    with torch.no_grad():
        torch.testing.assert_close(folded(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)
    return folded


def weight_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for name, tensor in model.named_parameters() if name.endswith("weight"))


@pytest.mark.parametrize("widen_groups_below", [1, 8, 16])
@pytest.mark.parametrize("forward", SHARING, ids=lambda forward: forward.__name__)
def test_the_function_stays(forward: Callable[[Network, torch.Tensor], Any], widen_groups_below: int) -> None:
    folded_equal(Network(forward), widen_groups_below=widen_groups_below)


@pytest.mark.parametrize("forward", [four_views, pyramid])
def test_an_encoder_called_several_times_has_its_weights_once_under_its_names(
    forward: Callable[[Network, torch.Tensor], Any],
) -> None:
    model = Network(forward)
    folded = folded_equal(model)
    convolutions = [name for name, module in folded.named_modules() if isinstance(module, nn.Conv2d)]
    assert convolutions == ["encoder.0", "encoder.1", "encoder.4", "encoder.6"]
    norm = model.get_parameter("encoder.2.weight")
    assert weight_bytes(folded) == weight_bytes(model.encoder) - norm.nbytes
    report = ss.fold_report(folded)
    assert {gather.layer for gather in report.gathers} <= set(convolutions)


def test_a_strided_layer_called_with_a_gather_before_it_and_without_one_has_a_stride_for_each_call() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = dense(), dense()
            self.layer = ss.ShuffledGroupConv2d(CHANNELS, CHANNELS, 1, stride=2, groups=4)
            self.layer.in_perm.copy_(torch.randperm(CHANNELS))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.last(self.layer(images) * self.layer(self.first(images)))
            return output

    folded = folded_equal(Strided())
    assert [(gather.layer, gather.side) for gather in ss.fold_report(folded).gathers] == [("layer_1", "input")]


def test_every_call_keeps_its_gathers_in_the_report() -> None:
    gathers = ss.fold_report(folded_equal(Network(four_views))).gathers
    once = ss.fold_report(folded_equal(Network(lambda net, images: net.encoder(images)))).gathers
    assert len(gathers) == 4 * len(once) > 0


def test_calls_take_one_order_where_their_neighbours_would_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Network(two_heads_on_groups)
    shared = weight_bytes(folded_equal(model))
    monkeypatch.setattr(reordering, "calls_by_origin", lambda graph_module: {})
    assert weight_bytes(folded_equal(model)) > shared


def test_calls_keep_an_order_each_where_one_for_all_would_take_a_gather() -> None:
    model = Network(two_heads)
    folded = folded_equal(model)
    report = ss.fold_report(folded)
    assert weight_bytes(folded) > weight_bytes(model)
    assert [gather.layer for gather in report.gathers if gather.side == "input"] == ["encoder.4"] * 2


@pytest.mark.parametrize("forward", SHARING, ids=lambda forward: forward.__name__)
def test_sharing_costs_no_gathers(
    forward: Callable[[Network, torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Network(forward)
    with_shared = folded_equal(model)
    monkeypatch.setattr(reordering, "calls_by_origin", lambda graph_module: {})
    with_separate = folded_equal(model)
    assert weight_bytes(with_shared) <= weight_bytes(with_separate)
    shared, separate = ss.fold_report(with_shared), ss.fold_report(with_separate)
    assert shared.gathered_bytes <= separate.gathered_bytes
    assert len(shared.gathers) <= len(separate.gathers)


def test_calls_that_need_different_weights_keep_them() -> None:
    model = Network(norm_after_one_call)
    nn.init.uniform_(model.norm.weight, 0.5, 1.5)
    folded = folded_equal(model)
    assert weight_bytes(folded) == 2 * model.head.weight.nbytes
    names = [name for name, module in folded.named_modules() if isinstance(module, nn.Conv2d)]
    assert names == ["head_1", "head_2"]


def test_a_layer_that_is_widened_for_several_calls_is_reported_once() -> None:
    model = Network(four_views)
    widened = ss.fold_report(folded_equal(model, widen_groups_below=8)).widened
    assert [layer.layer for layer in widened] == ["encoder.1", "encoder.4"]


def test_modules_tied_by_a_parameter_share_it_again() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.mix, self.scores = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10)
            self.scores.weight = self.words.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.scores(self.mix(self.words(words)))
            return scores

    model = Tied().eval()
    words = torch.arange(10).view(2, 5)
    folded = ss.fold(model, words)
    torch.testing.assert_close(folded(words), model(words).detach())
    assert ss.fold_report(folded).untraced_reason == ""
    assert folded.get_parameter("scores.weight") is folded.get_parameter("words.weight")
    assert sum(tensor.numel() for tensor in folded.parameters()) == sum(tensor.numel() for tensor in model.parameters())


def test_a_tensor_that_the_graph_reads_is_shared_with_the_layer_that_has_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = dense()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return functional.conv_transpose2d(self.layer(images), self.layer.weight)

    folded = folded_equal(Tied())
    assert weight_bytes(folded) == CHANNELS * CHANNELS * 4


def test_equal_layers_that_were_never_one_stay_two() -> None:
    model = nn.Sequential(dense(), nn.ReLU(), dense())
    model[2].load_state_dict(model[0].state_dict())
    folded = folded_equal(model)
    assert folded.get_submodule("0") is not folded.get_submodule("2")


def test_saving_and_counting_see_a_shared_layer_once() -> None:
    model = Network(four_views)
    folded = folded_equal(model)
    file = io.BytesIO()
    torch.save(folded, file)
    file.seek(0)
    restored = torch.load(file, weights_only=False)
    assert ss.fold_report(restored) == ss.fold_report(folded)
    assert len(list(restored.parameters())) == len(list(folded.parameters()))
    torch.testing.assert_close(restored(IMAGES), folded(IMAGES), rtol=0, atol=0)
    assert ss.count_macs(folded, IMAGES).macs == ss.count_macs(model, IMAGES).macs
    program = torch.export.export(folded, (IMAGES,))
    assert weight_bytes(program.module()) == weight_bytes(folded)
