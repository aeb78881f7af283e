"""Tensors that are read past their layer are found in the source; whoever only asks about one does not read it."""

from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import strucspars as ss
from strucspars.nn.weight_readers import readers_of_weights


class Block(nn.Module):
    """With a layer inside, to be reached by more than one name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class Network(nn.Module):
    """Its docstring names self.layer.weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.block = Block()
        self.listed: Any = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


class Reads(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.layer.weight, self.layer.bias)


class ReadsTransposed(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.layer.weight.T


class ReadsByComparing(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ (self.layer.weight > 0).to(input)


class ReadsDeeper(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(linear(input, self.block.inner.weight), self.listed[1].weight)


class ReadsByInheritance(Reads):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class ReadsWhatIsMissing(Network):
    missing: Any = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input if self.missing is None else linear(input, self.missing.weight)


class ReadsByAnotherName(Network):
    def forward(this, input: torch.Tensor) -> torch.Tensor:  # the name is the point
        return linear(input, this.layer.weight)


class ReadsOfAnother(Network):
    def forward(self, input: torch.Tensor, other: Network) -> torch.Tensor:
        return linear(input, other.layer.weight)


class ReadsTheBias(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(input)
        return (output - self.layer.bias) * 2 + self.layer.bias


class ReadsInAMethod(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.encoded(input)

    def encoded(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.transposed)

    @property
    def transposed(self) -> torch.Tensor:
        return self.layer.weight.T


class ReadsInAnOverriddenMethod(ReadsInAMethod):
    def encoded(self, input: torch.Tensor) -> torch.Tensor:
        return super().encoded(input) * 2

    @property
    def transposed(self) -> torch.Tensor:
        return self.block.inner.weight


class ReadsInAMethodOfOthers(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(input)
        return output

    def norm(self) -> torch.Tensor:
        return self.layer.weight.abs().sum()


class ReadsByALocalName(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        block, inputs = self.block, input
        inner = block.inner if inputs.dim() > 1 else self.layer
        return linear(inputs, inner.weight)


class ReadsWhatItUnpacks(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        _, second = self.listed
        return linear(input, second.weight)


class ReadsInALoop(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in self.listed:
            input = linear(input, layer.weight)
        return input


class ReadsInAnotherLoop(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for place, (layer, scale) in enumerate(zip(self.listed[1:], (2, 3), strict=False)):
            input = linear(input, layer.weight) * scale + place
        return input


class ReadsInAComprehension(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ torch.stack([layer.weight for _, layer in self.listed.named_children()]).sum(0)


class ReadsByAPlace(Network):
    def forward(self, input: torch.Tensor, place: int = 1) -> torch.Tensor:
        return linear(input, self.listed[place].weight)


class GoesDown(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        part: nn.Module = self.listed
        while isinstance(part, nn.ModuleList):
            part = part[0] if input.dim() > 1 else part[1]
        return linear(input, part.weight)  # type: ignore[arg-type]  # a module's attribute may be anything


class FailsToTell(Network):
    @property
    def built(self) -> nn.Module:
        raise RuntimeError("call the network first")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.built.weight)  # type: ignore[arg-type]  # never computed


class CallsInALoop(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        for each in [layer, *self.listed]:
            input = each(input.to(layer.weight.device))
        return input


class Asks(Network):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Not self.layer.weight itself."""
        # Nor does a remark on self.layer.weight read it.
        if self.layer.bias is None or self.layer.weight is None or not isinstance(self.layer.weight, nn.Parameter):
            return input
        input = input.to(self.layer.weight.device).to(self.layer.weight).type_as(self.layer.weight)
        output: torch.Tensor = self.layer(input.expand(-1, self.layer.weight.shape[1]))
        return output


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Reads, ["layer"]),
        (ReadsTransposed, ["layer"]),
        (ReadsByComparing, ["layer"]),
        (ReadsDeeper, ["block.inner", "listed.1"]),
        (ReadsByInheritance, ["layer"]),
        (ReadsByAnotherName, ["layer"]),
        (ReadsTheBias, ["layer"]),
        (ReadsInAMethod, ["layer"]),
        (ReadsInAnOverriddenMethod, ["layer", "block.inner"]),
        (ReadsInAMethodOfOthers, []),
        (ReadsByALocalName, ["layer", "block.inner"]),
        (ReadsWhatItUnpacks, ["listed.0", "listed.1"]),
        (ReadsInALoop, ["listed.0", "listed.1"]),
        (ReadsInAnotherLoop, ["listed.0", "listed.1"]),
        (ReadsInAComprehension, ["listed.0", "listed.1"]),
        (ReadsByAPlace, ["listed.0", "listed.1"]),
        (GoesDown, ["listed", "listed.0", "listed.1"]),
        (FailsToTell, []),
        (CallsInALoop, []),
        (ReadsOfAnother, []),
        (ReadsWhatIsMissing, []),
        (Asks, []),
        (type("Made", (Network,), {"forward": eval("lambda self, input: input @ self.layer.weight")}), []),
    ],
)
def test_layers_are_found_by_the_source_of_their_reader(kind: type[Network], names: list[str]) -> None:
    model = nn.Sequential(kind())
    readers = readers_of_weights(model)
    assert {name: readers[module] for name, module in model.named_modules() if module in readers} == {
        f"0.{name}": f"{kind.__name__} reads its {'bias' if kind is ReadsTheBias else 'weight'}" for name in names
    }


def test_layers_that_a_forward_of_the_objects_own_reads_are_found() -> None:
    def forward(self: Network, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.layer.weight)

    replaced, other = CallsInALoop(), CallsInALoop()
    replaced.forward = MethodType(forward, replaced)  # type: ignore[method-assign]  # that is the point
    assert readers_of_weights(nn.ModuleList([replaced, other])) == {replaced.layer: "CallsInALoop reads its weight"}


def test_layers_that_are_read_are_skipped_with_the_reason() -> None:
    selection = ss.select_layers(Reads(), ss.SparsifyConfig(layer_types=("Linear",)))
    assert [layer.name for layer in selection.layers] == ["block.inner", "listed.0", "listed.1"]
    assert [layer.reason for layer in selection.skipped] == ["Reads reads its weight itself, and would go on as before"]


def test_a_layer_whose_bias_is_read_keeps_its_order() -> None:
    torch.manual_seed(0)
    model, rules = ReadsTheBias(), ss.SparsifyConfig(include=("layer",), layer_types=("Linear",))
    selection = ss.select_layers(model, rules)
    told = "ReadsTheBias reads its bias itself, and would go on as before"
    assert [layer.reason for layer in selection.skipped if layer.name == "layer"] == [told]
    order = np.array([1, 0, 3, 2])
    layer = ss.LayerPlan(group_level=2, out_perm=order, in_perm=order, weight_shape=(4, 4))
    with pytest.raises(ValueError, match=f"layer 'layer': {told}; take it off the plan"):
        ss.convert_(model, ss.GroupingPlan({"layer": layer}))


def test_a_layer_without_the_bias_that_is_read_can_be_grouped() -> None:
    model = ReadsTheBias()
    model.layer = nn.Linear(4, 4, bias=False)
    assert readers_of_weights(model) == {}
