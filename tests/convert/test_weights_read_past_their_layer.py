"""Tensors that something reads past their layer: any way to the bias is right, the weight is refused by running."""

import copy
import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from planned_networks import plan_for
from torch import nn
from torch.nn.functional import linear

import strucspars as ss


class Network(nn.Module):
    """Adds to the outputs what `read` gets out of the network; `layer` can be reached in several ways."""

    def __init__(self, read: Callable[["Network"], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers, self.by_name = [self.layer], {"layer": self.layer}
        self.tensors, self.reference = [self.layer.bias], weakref.ref(self.layer)
        self.read = read

    def __deepcopy__(self, memo: dict[int, Any]) -> "Network":
        twin = Network(self.read)
        twin.load_state_dict(self.state_dict())
        return twin

    @property
    def bias_of_layer(self) -> torch.Tensor:
        return self.layer.bias

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.other(self.layer(features))
        return outputs + self.read(self)


def tensor_of(layer: nn.Module, name: str) -> torch.Tensor:
    return layer.get_parameter(name)


WAYS: dict[str, Callable[[Any, str], torch.Tensor]] = {
    "attribute": lambda network, name: getattr(network.layer, name),
    "attrgetter": lambda network, name: operator.attrgetter(f"layer.{name}")(network),
    "__getattr__": lambda network, name: network.layer.__getattr__(name),
    "get_parameter": lambda network, name: network.get_parameter(f"layer.{name}"),
    "get_submodule": lambda network, name: getattr(network.get_submodule("layer"), name),
    "_parameters": lambda network, name: network.layer._parameters[name],
    "vars": lambda network, name: vars(network.layer)["_parameters"][name],
    "_modules": lambda network, name: getattr(network._modules["layer"], name),
    "state_dict of the layer": lambda network, name: network.layer.state_dict()[name],
    "state_dict of the network": lambda network, name: network.state_dict()[f"layer.{name}"],
    "named_parameters of the layer": lambda network, name: dict(network.layer.named_parameters())[name],
    "named_parameters of the network": lambda network, name: dict(network.named_parameters())[f"layer.{name}"],
    "parameters by place": lambda network, name: list(network.parameters())[["weight", "bias"].index(name)],
    "modules": lambda network, name: getattr(next(m for m in network.modules() if m is not network), name),
    "children": lambda network, name: getattr(next(network.children()), name),
    "named_modules": lambda network, name: getattr(dict(network.named_modules())["layer"], name),
    "list of layers": lambda network, name: getattr(network.layers[0], name),
    "dictionary of layers": lambda network, name: getattr(network.by_name["layer"], name),
    "weak reference": lambda network, name: getattr(network.reference(), name),
    "helper function": lambda network, name: tensor_of(network.layer, name),
    "partial": lambda network, name: partial(tensor_of, network.layer)(name),
    "evaluated text": lambda network, name: eval(f"network.layer.{name}"),
    "generator": lambda network, name: next(getattr(layer, name) for layer in network.layers),
}
WAYS_TO_THE_BIAS = {way: partial(lambda read, network: read(network, "bias"), read) for way, read in WAYS.items()} | {
    "property": lambda network: network.bias_of_layer,
    "kept tensor": lambda network: network.tensors[0],
    "functional.linear": lambda network: linear(torch.ones(8), torch.eye(8), network.layer.bias),
}
FEATURES = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


def network_and_plan(read: Callable[[Any], torch.Tensor]) -> tuple[Network, ss.GroupingPlan]:
    torch.manual_seed(0)
    network = Network(read).eval()
    return network, plan_for(network, "layer", "other")


@pytest.mark.parametrize("way", WAYS_TO_THE_BIAS)
def test_a_bias_that_is_read_in_any_way_is_right(way: str) -> None:
    network, plan = network_and_plan(WAYS_TO_THE_BIAS[way])
    expected = ss.mask_(copy.deepcopy(network), plan)(FEATURES)
    torch.testing.assert_close(ss.convert_(network, plan, example_inputs=FEATURES)(FEATURES), expected)


def add_the_bias(layer: nn.Module, inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
    return outputs + layer.get_parameter("bias")


def scale_by_the_rows(layer: nn.Module, inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = layer.get_parameter("weight").norm(dim=1)
    return outputs / scale


@pytest.mark.parametrize("hook", [add_the_bias, scale_by_the_rows])
def test_a_hook_that_uses_values_of_the_output_channels_is_right(hook: Callable[..., torch.Tensor]) -> None:
    network, plan = network_and_plan(lambda network: torch.zeros(()))
    masked = ss.mask_(copy.deepcopy(network), plan)
    for model in (network, masked):
        model.get_submodule("layer").register_forward_hook(hook)
    expected = masked(FEATURES)
    torch.testing.assert_close(ss.convert_(network, plan, example_inputs=FEATURES)(FEATURES), expected)


@pytest.mark.parametrize("use", [lambda weight: FEATURES @ weight.T, lambda weight: weight[:, :2].sum(1)])
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_is_read_past_its_layer_is_refused_by_running_the_network(
    way: str, use: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    network, plan = network_and_plan(lambda network: use(WAYS[way](network, "weight")))
    before, state = network(FEATURES), copy.deepcopy(network.state_dict())
    with pytest.raises(
        ValueError, match=r"layer 'layer': grouped, the network computes something else than masked: .+"
    ):
        ss.convert_(network, plan, example_inputs=FEATURES)
    assert type(network.layer) is type(network.other) is nn.Linear
    torch.testing.assert_close(network.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(network(FEATURES), before)


def test_what_only_random_inputs_show_is_refused_too() -> None:
    network, plan = network_and_plan(lambda network: torch.zeros(()))

    def add_more(layer: nn.Module, inputs: tuple[torch.Tensor], outputs: torch.Tensor) -> torch.Tensor:
        return outputs + inputs[0][..., :2] @ layer.get_parameter("weight")[:, :2].T

    network.layer.register_forward_hook(add_more)
    with pytest.raises(ValueError, match="layer 'layer': grouped"):
        ss.convert_(network, plan, example_inputs=torch.zeros(4, 8))


def test_the_check_leaves_modes_gradients_masks_and_random_numbers_alone() -> None:
    network, plan = network_and_plan(lambda network: torch.zeros(()))
    network.train()(FEATURES).sum().backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    network.read = lambda network: network.layer.weight[:, :2].sum(1)
    ss.mask_(network, plan)
    state, random_state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match="layer 'layer': grouped"):
        ss.convert_(network, plan, example_inputs=FEATURES)
    assert network.training
    assert network.layer.training
    assert network.layer.get_buffer("mask").any()
    assert all(parameter.grad is gradients[name] for name, parameter in network.named_parameters())
    torch.testing.assert_close(network.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
