"""What cannot be grouped or masked is refused, before anything changes."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from planned_networks import Net, plan_for, random_network, random_plan
from torch import nn
from torch.nn.utils import prune

import strucspars as ss
from strucspars.convert.conversion import convert_, mask_
from strucspars.nn.names import copied


def bad_plan(model: nn.Module, name: str, shape: tuple[int, ...]) -> ss.GroupingPlan:
    good = random_plan(model)
    bad = ss.LayerPlan(group_level=2, out_perm=np.arange(shape[0]), in_perm=np.arange(shape[1]), weight_shape=shape)
    return ss.GroupingPlan(dict(good.layers) | {name: bad})


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("expnad", (48, 16, 1, 1), "'expnad' of the plan is not in the network; did you mean 'expand'"),
        ("expand", (48, 16, 3, 3), r"layer 'expand': its weight is \(48, 16, 1, 1\), but the plan"),
        ("depthwise", (48, 48, 3, 3), "layer 'depthwise': depthwise: nothing to divide"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(name: str, shape: tuple[int, ...], complaint: str) -> None:
    model = random_network()
    before = copy.deepcopy(model.state_dict())
    for change_ in (convert_, mask_):
        with pytest.raises(ValueError, match=complaint):
            change_(model, bad_plan(model, name, shape))
    assert type(model.expand) is nn.Conv2d
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_weight_that_two_layers_share_is_refused() -> None:
    first, second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    layer = ss.LayerPlan(group_level=2, out_perm=np.arange(4), in_perm=np.arange(4), weight_shape=(4, 4, 1, 1))
    with pytest.raises(ValueError, match="layer '0': its weight is shared with '1'"):
        convert_(model, ss.GroupingPlan({"0": layer}))


@pytest.mark.parametrize("change_", [convert_, mask_])
def test_a_plan_that_names_a_shared_module_twice_is_refused_before_anything_changes(
    change_: Callable[..., nn.Module],
) -> None:
    layer = nn.Conv2d(8, 8, 3)
    model = nn.Sequential(layer, layer)
    (planned,) = random_plan(model, level=2).layers.values()
    with pytest.raises(ValueError, match="layers '0' and '1' of the plan are one shared module; keep one"):
        change_(model, ss.GroupingPlan({"0": planned, "1": planned}))
    assert type(layer) is nn.Conv2d
    assert layer.weight.all()


@pytest.mark.parametrize("change_", [convert_, mask_])
def test_a_model_on_the_meta_device_is_refused_with_the_remedy(change_: Callable[..., nn.Module]) -> None:
    with torch.device("meta"):
        model = Net()
    plan = random_plan(model)
    with pytest.raises(ValueError, match=r"layer 'expand' is on the meta device, .* call model\.to_empty\(device="):
        change_(model, plan)
    assert type(model.expand) is nn.Conv2d


class OtherTensor(torch.Tensor):
    """Stands for the weights of quantisation libraries, which are tensors of their own classes."""


@pytest.mark.parametrize("change_", [convert_, mask_])
def test_a_weight_that_is_no_plain_tensor_is_refused(change_: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1))
    plan = random_plan(model)
    model[0].weight = nn.Parameter(torch.randn(8, 4, 1, 1).as_subclass(OtherTensor))
    with pytest.raises(ValueError, match="layer '0': its weight is a OtherTensor, not a plain tensor; remove it"):
        change_(model, plan)


@pytest.mark.parametrize("change_", [convert_, mask_])
def test_a_lazy_layer_is_refused_with_the_remedy(change_: Callable[..., nn.Module]) -> None:
    plan = random_plan(nn.Sequential(nn.Conv2d(4, 8, 1)))
    with pytest.raises(ValueError, match=r"layer '0' has no plain weight: it is lazy, .*; run the model once"):
        change_(nn.Sequential(nn.LazyConv2d(8, 1)), plan)


def test_a_planned_layer_of_another_kind_is_named_with_its_type() -> None:
    plan = random_plan(nn.Sequential(nn.Conv2d(4, 8, 1)))
    with pytest.raises(ValueError, match="layer '0': BatchNorm2d is no convolution or linear layer"):
        convert_(nn.Sequential(nn.BatchNorm2d(8)), plan)


def biases_shared(model: nn.Sequential) -> None:
    model[1].bias = model[0].bias


def bias_pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[1], "bias", amount=2)  # type: ignore[no-untyped-call]  # untyped in torch


def bias_as_buffer(model: nn.Sequential) -> None:
    bias = model[1].get_parameter("bias").detach()
    del model[1].bias
    model[1].register_buffer("bias", bias)


@pytest.mark.parametrize("change", [biases_shared, bias_pruned, bias_as_buffer])
def test_any_kind_of_bias_stays_as_it_is(change: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    change(model)
    plan, images = plan_for(model, "0", "1"), torch.randn(1, 8, 3, 3)
    masked, biases = mask_(copied(model), plan), [layer.bias for layer in model]
    torch.testing.assert_close(convert_(model, plan)(images), masked(images))
    assert all(layer.bias is bias for layer, bias in zip(model, biases, strict=True) if "bias" in layer._parameters)
