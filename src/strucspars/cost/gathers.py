"""Channel shuffles that a forward pass carries out: copies that take time and compute nothing."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from strucspars.core.checks import IntArray
from strucspars.core.plan import LayerPlan
from strucspars.cost.counting import uncompiled
from strucspars.nn.layers import channel_orders, is_grouped, planned_orders
from strucspars.nn.names import bare_modules

Side = Literal["input", "output"]


@dataclass(frozen=True, kw_only=True)
class RemainingGather:
    """One channel shuffle that is left in a network.

    Attributes:
        layer: name of the grouped layer that needs it.
        side: before the layer, or after it.
        channels: how many channels it copies.
        runs: in how many runs of neighbouring channels; few long ones are cheaper.
        nbytes: how much it copies for the example inputs, the whole batch of them.
    """

    layer: str
    side: Side
    channels: int
    runs: int
    nbytes: int


def contiguous_runs(gathers: IntArray) -> IntArray:
    """Into how many runs of neighbouring channels each gather falls: few long copies are cheaper than many short ones.

    One run of all channels is the order that is there already.

    >>> contiguous_runs(np.array([[4, 5, 6, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]]))
    array([2, 1])
    """
    runs: IntArray = np.count_nonzero(np.diff(gathers) != 1, axis=-1) + np.int64(1)
    return runs


@contextmanager
def noted_shuffles(model: nn.Module, planned: Mapping[str, LayerPlan] | None = None) -> Iterator[list[RemainingGather]]:
    """Note the shuffles of every grouped layer that is called meanwhile, two per call, in the order of the calls.

    Args:
        model: converted, or dense with a plan.
        planned: dense or masked layers by name, to take for the grouped ones that they would become.
    """
    planned = planned or {}
    names: dict[nn.Module, str] = {}
    orders: dict[nn.Module, Mapping[str, torch.Tensor]] = {}
    for name, module in bare_modules(model):
        if is_grouped(module):
            names[module], orders[module] = name, channel_orders(module)
        elif name in planned and planned[name].num_groups > 1:
            names[module], orders[module] = name, planned_orders(planned[name])
    noted: list[RemainingGather] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: torch.Tensor) -> None:
        inputs = args[0] if args else kwargs["input"]
        noted.extend(_two_shuffles(names[module], orders[module], inputs.nbytes, outputs.nbytes))

    with ExitStack() as hooks:
        for module in names:
            # Ahead of the user's own hooks, which may change the output.
            hooks.callback(module.register_forward_hook(note, prepend=True, with_kwargs=True).remove)
        yield noted


def shuffles_in_pass(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[RemainingGather, ...]:
    """The shuffles of all grouped layers that one forward pass calls, as they come."""
    with noted_shuffles(model) as noted, uncompiled(model):
        model(*arguments)
    return tuple(noted)


def shuffles_inside(name: str, module: nn.Module, in_bytes: int, out_bytes: int) -> list[RemainingGather]:
    """The two shuffles of a grouped layer that stays as it is."""
    return _two_shuffles(name, channel_orders(module), in_bytes, out_bytes)


def _two_shuffles(
    name: str, orders: Mapping[str, torch.Tensor], in_bytes: int, out_bytes: int
) -> list[RemainingGather]:
    return [
        _shuffle(name, "input", orders["in_perm"], in_bytes),
        _shuffle(name, "output", orders["out_inverse"], out_bytes),
    ]


def _shuffle(name: str, side: Side, order: torch.Tensor, nbytes: int) -> RemainingGather:
    # On the meta device orders have no values: as many runs as there can be.
    runs = len(order) if order.is_meta else int(contiguous_runs(order.cpu().numpy()))
    return RemainingGather(layer=name, side=side, channels=len(order), runs=runs, nbytes=nbytes)
