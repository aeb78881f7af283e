"""Orders of grouped layers: in the state, on the device, and out of reach of whoever averages weights."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch_warnings import COMPILER_WARNS

import strucspars as ss
from strucspars.nn.layers import ORDER_NAMES, channel_orders, group_module_

IMAGES = torch.randn(2, 64, 5, 5, generator=torch.Generator().manual_seed(1))
KEYS = ["0.weight", "0.bias", "0.in_perm", "0.out_inverse", "1.weight", "1.bias", "1.in_perm", "1.out_inverse"]


def shuffled_layer(in_channels: int, out_channels: int, seed: int = 0) -> nn.Conv2d:
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    layer = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    plan = ss.LayerPlan(
        group_level=3,
        out_perm=generator.permutation(out_channels),
        in_perm=generator.permutation(in_channels),
        weight_shape=tuple(layer.weight.shape),
    )
    group_module_(layer, plan)
    return layer


def network(seed: int = 0) -> nn.Sequential:
    return nn.Sequential(shuffled_layer(64, 128, seed), shuffled_layer(128, 32, seed + 1))


def orders(model: nn.Module) -> list[torch.Tensor]:
    return [order for layer in model.children() for order in channel_orders(layer).values()]


def assert_same_function(model: nn.Module, expected: nn.Module) -> None:
    assert all(torch.equal(*pair) for pair in zip(orders(model), orders(expected), strict=True))
    torch.testing.assert_close(model(IMAGES), expected(IMAGES))


AVERAGES: dict[str, dict[str, Any]] = {
    "together, 0.9": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},  # type: ignore[no-untyped-call]  # untyped in torch
    "together, 0.9999": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9999)},  # type: ignore[no-untyped-call]  # untyped in torch
    "one by one, 0.9": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},  # type: ignore[no-untyped-call]  # untyped in torch
    "one by one, 0.9999": {"avg_fn": swa_utils.get_ema_avg_fn(0.9999)},  # type: ignore[no-untyped-call]  # untyped in torch
    "equal weights": {},
}


@pytest.mark.parametrize("how", AVERAGES)
def test_averaging_parameters_and_buffers_leaves_the_orders_alone(how: str) -> None:
    model = network()
    average = swa_utils.AveragedModel(model, use_buffers=True, **AVERAGES[how])
    for _ in range(20):
        average.update_parameters(model)
    assert_same_function(average.module, model)


def test_averaging_a_single_layer_leaves_its_orders_alone() -> None:
    layer = shuffled_layer(64, 128)
    average = swa_utils.AveragedModel(layer, use_buffers=True, **AVERAGES["together, 0.9"])
    for _ in range(20):
        average.update_parameters(layer)
    torch.testing.assert_close(average.module(IMAGES), layer(IMAGES))


@torch.no_grad()
def average_states_(average: nn.Module, model: nn.Module, decay: float) -> None:
    """As timm's `ModelEmaV2` does it: whatever is in the state is averaged."""
    for averaged, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        averaged.copy_(decay * averaged + (1 - decay) * value)


@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_averaging_states_leaves_the_orders_alone(decay: float) -> None:
    model = network()
    average = copy.deepcopy(model)
    for _ in range(20):
        average_states_(average, model, decay)
    assert_same_function(average, model)


def test_a_state_has_the_keys_of_buffers_and_holds_copies() -> None:
    model = network()
    expected = copy.deepcopy(model)
    state = model.state_dict(keep_vars=True)
    assert list(state) == KEYS
    assert {state[key].dtype for key in KEYS if key.endswith(ORDER_NAMES)} == {torch.int64}
    for key in KEYS[2:4]:
        state[key].zero_()
    assert_same_function(model, expected)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_brings_its_orders_along(assign: bool) -> None:
    model, expected = network(seed=5), network()
    model.load_state_dict(expected.state_dict(), assign=assign)
    assert_same_function(model, expected)


def test_an_assigned_order_in_another_precision_becomes_whole_numbers() -> None:
    model = network()
    expected = model(IMAGES)
    twin = network()
    for order in orders(twin):
        order.copy_(order.flip(0))
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    twin.load_state_dict(state, assign=True)
    assert {order.dtype for order in orders(twin)} == {torch.int64}
    torch.testing.assert_close(twin(IMAGES), expected)


def test_loading_writes_into_the_order_at_hand() -> None:
    # A captured CUDA graph goes on reading from there.
    model = network(seed=5)
    before = [order.data_ptr() for order in orders(model)]
    model.load_state_dict(network().state_dict())
    assert [order.data_ptr() for order in orders(model)] == before


def averaged_in_place(order: torch.Tensor) -> torch.Tensor:
    return order.copy_(0.9 * order + 0.1 * order)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    "damage",
    [averaged_in_place, lambda order: order.fill_(10**6), lambda order: order - 1, lambda order: order * 0.9],
    ids=["averaged", "out of range", "negative", "fractions"],
)
def test_a_damaged_order_is_refused_by_name_and_not_taken_over(
    damage: Callable[[torch.Tensor], torch.Tensor], assign: bool
) -> None:
    model = network()
    expected = copy.deepcopy(model)
    state = copy.deepcopy(model.state_dict())
    state["1.in_perm"] = damage(state["1.in_perm"])
    complaint = r"1\.in_perm is not a permutation: it must hold every channel from 0 to 127 .* were buffers averaged\?"
    with pytest.raises(RuntimeError, match=complaint):
        model.load_state_dict(state, assign=assign)
    assert_same_function(model, expected)


def test_loading_is_strict_about_orders() -> None:
    state = network().state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.in_perm"):
        network().load_state_dict({**state, "0.in_perm": torch.arange(63)})
    missing = {key: tensor for key, tensor in state.items() if key != "1.out_inverse"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1\.out_inverse"'):
        network().load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "1\.out_perm"'):
        network().load_state_dict({**state, "1.out_perm": torch.arange(32)})
    assert network().load_state_dict(missing, strict=False).missing_keys == ["1.out_inverse"]


def test_a_layer_keeps_its_orders_where_loading_fails_halfway() -> None:
    def refuse(*arguments: Any) -> None:
        raise KeyError("an older version")

    layer = shuffled_layer(64, 128)
    expected = copy.deepcopy(layer)
    handle = layer.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]  # untyped in torch
    with pytest.raises(KeyError, match="an older version"):
        layer.load_state_dict(expected.state_dict())
    handle.remove()
    assert not dict(layer.named_buffers())
    assert torch.equal(layer(IMAGES), expected(IMAGES))
    layer.load_state_dict(shuffled_layer(64, 128, seed=5).state_dict())


@pytest.mark.parametrize(
    "change",
    [nn.Module.double, lambda model: model.to(torch.float64), lambda model: model.type(torch.float64)],
    ids=["double", "to", "type"],
)
def test_orders_stay_whole_numbers_in_every_precision(change: Callable[[nn.Module], nn.Module]) -> None:
    model = network()
    expected = model(IMAGES).double()
    changed = change(model)
    assert {order.dtype for order in orders(changed)} == {torch.int64}
    torch.testing.assert_close(changed(IMAGES.double()), expected, rtol=1e-4, atol=1e-5)
    assert {order.dtype for order in orders(change(network().to("meta")))} == {torch.int64}


def test_orders_go_to_the_meta_device_and_come_back_with_the_state() -> None:
    expected = network()
    copied_into, assigned = network(seed=5).to("meta"), network(seed=5).to("meta")
    assert all(order.is_meta for order in orders(assigned))
    copied_into.to_empty(device="cpu").load_state_dict(expected.state_dict())
    assigned.load_state_dict(expected.state_dict(), assign=True)
    assert_same_function(copied_into, expected)
    assert_same_function(assigned, expected)


def test_a_state_without_values_is_assigned_as_it_is() -> None:
    model = network()
    model.load_state_dict(network(seed=5).to("meta").state_dict(), assign=True)
    assert all(order.is_meta for order in orders(model))


def test_emptying_tensors_keeps_orders_that_have_values() -> None:
    model = network()
    expected = [order.clone() for order in orders(model)]
    model.to_empty(device="cpu")
    assert all(torch.equal(*pair) for pair in zip(orders(model), expected, strict=True))


def test_orders_are_shared_with_other_processes_as_weights_are() -> None:
    for order in orders(network().share_memory()):
        assert order.is_shared()  # type: ignore[no-untyped-call]  # untyped in torch


def test_copies_and_pickles_have_orders_of_their_own() -> None:
    model = network()
    expected = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    duplicates = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for order in orders(model):
        order.zero_()
    for duplicate in duplicates:
        assert_same_function(duplicate, expected)


@COMPILER_WARNS  # loaded for this where there is a GPU
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("build", [network, lambda: shuffled_layer(64, 128)], ids=["network", "layer"])
def test_orders_are_constants_of_an_exported_program(build: Callable[[], nn.Module], strict: bool) -> None:
    model = build()
    program = torch.export.export(model, (IMAGES,), strict=strict)
    assert program.graph_signature.buffers == ()
    torch.testing.assert_close(program.module()(IMAGES), model(IMAGES))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_orders_follow_inputs_to_a_device_that_only_parameters_were_copied_to() -> None:
    # As `nn.DataParallel` does on its second device.
    layer = shuffled_layer(64, 128)
    replica = layer._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # untyped in torch
    for name in ("weight", "bias"):
        setattr(replica, name, layer.get_parameter(name).detach().cuda())
    torch.testing.assert_close(replica(IMAGES.cuda()).cpu(), layer(IMAGES), rtol=1e-3, atol=1e-3)
