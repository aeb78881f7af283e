"""Networks, and layers, that keep their shuffles: a graph around what could not be looked into."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn

from strucspars.convert.folding.group_matching import contiguous_runs
from strucspars.convert.folding.report import RemainingGather
from strucspars.core.arrays import IntArray
from strucspars.nn.shuffled import is_grouped


def graph_of_one_call(model: nn.Module, num_inputs: int) -> fx.GraphModule:
    """A graph that does nothing but call the model."""
    root = nn.Module()
    root.model = model
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(f"input_{place}") for place in range(1, num_inputs + 1))
    graph.output(graph.call_module("model", inputs))
    return fx.GraphModule(root, graph, type(model).__name__)


def shuffles_in_pass(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[RemainingGather, ...]:
    """The shuffles of all grouped layers that one forward pass calls, as they come."""
    remaining: list[RemainingGather] = []
    names = {module: name for name, module in model.named_modules() if is_grouped(module)}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> None:
        remaining.extend(shuffles_inside(names[module], module, inputs[0].nbytes, outputs.nbytes))

    with ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_hook(note).remove)
        model(*arguments)
    return tuple(remaining)


def shuffles_inside(name: str, module: nn.Module, in_bytes: int, out_bytes: int) -> list[RemainingGather]:
    """The two shuffles of a grouped layer that stays as it is."""
    in_perm: IntArray = module.get_buffer("in_perm").cpu().numpy()
    out_inverse: IntArray = module.get_buffer("out_inverse").cpu().numpy()
    return [
        RemainingGather(
            layer=name, side="input", channels=len(in_perm), runs=contiguous_runs(in_perm), nbytes=in_bytes
        ),
        RemainingGather(
            layer=name, side="output", channels=len(out_inverse), runs=contiguous_runs(out_inverse), nbytes=out_bytes
        ),
    ]
