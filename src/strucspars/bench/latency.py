"""How long every layer of a network takes at every group level, measured inside the network.

The dense network and copies of it with all layers at one group level are written as files for deployment, and timed in
turn. The runtime's own profile divides each time among the layers, so that a layer is measured with the memory, layouts
and fused operations it has there. What the grouped networks take besides is copies of channels, and the changes of
layout around them: it is shared out by the bytes that are copied.
"""

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strucspars._version import __version__
from strucspars.bench.machine import environment, hardware
from strucspars.bench.networks import random_plan
from strucspars.bench.profiles import RUNTIMES, ProfiledRuntime, TimedFile
from strucspars.bench.suite import TimingRules
from strucspars.channels.sharing import NetworkChannels, UntraceableNetwork, network_channels
from strucspars.convert.comparison import random_arguments
from strucspars.convert.conversion import convert_
from strucspars.core.budget import Shuffle
from strucspars.cost.counting import ExampleInputs, arguments_of, count_macs
from strucspars.cost.gathers import RemainingGather
from strucspars.cost.latency import LatencyTable, cache_folder, network_key, read_table, write_table
from strucspars.export.program import inference_program
from strucspars.nn.groupable import SelectedLayer, select_layers
from strucspars.nn.names import copied, unwrapped
from strucspars.sparsify.calibration import OnProgress, ignore_progress
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.orders import network_orders, own_sides

logger = logging.getLogger(__name__)

# 32 groups: narrower ones are rarely faster in the runtimes, and files run them as wider ones.
MOST_LEVELS = 6
# For every network together.
RULES = TimingRules(seconds=15.0, visit_seconds=0.2, max_calls=10, min_rounds=5, max_rounds=15)
# Between the quartiles, of the median.
NOTABLE_SPREAD = 0.15


def latency_table(
    model: nn.Module, example_inputs: ExampleInputs, config: SparsifyConfig, on_progress: OnProgress | None = None
) -> LatencyTable:
    """The milliseconds of a dense network's layers in `config.runtime`, on one core; measured once for every machine.

    Args:
        model: the dense network; it does not change.
        example_inputs: of the size that is to be fast, such as one image; their values do not matter.
        config: the runtime, the order policy, and which layers may be grouped.
        on_progress: called as `on_progress(what, done, total)`.

    Raises:
        ValueError: the network cannot be traced or exported.
    """
    dense = copied(unwrapped(model)).cpu().eval()
    arguments = random_arguments(_on_cpu(arguments_of(dense, example_inputs)), in_double=False)
    runtime = RUNTIMES[config.runtime]()
    machine = " ".join(str(value) for value in hardware(environment()).values() if value)
    counted = count_macs(dense, arguments).layers
    # A layer that no call reaches, as in an auxiliary head, takes no time.
    layers = [layer for layer in select_layers(dense, config).layers if counted[layer.name].macs]
    try:
        channels = network_channels(dense, arguments)
    except UntraceableNetwork as error:
        raise ValueError(f"budget='latency' follows the channels of the network, but {error}; or count macs") from error
    key = network_key(
        __version__,
        machine,
        runtime.title,
        config.orders,
        config.pieces,
        # Activations, norms and poolings are not among the layers.
        str(dense),
        sorted(channels.classes.items()),
        [tuple(tensor.shape) for tensor in arguments],
        [(layer.name, layer.weight_shape, layer.largest_level) for layer in layers],
        [(name, layer.macs) for name, layer in counted.items()],
    )
    path = cache_folder() / f"{key}.json"
    try:
        return read_table(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning("the layers are timed again, because the table of their times cannot be read: %s", error)
    measured = _measured(dense, arguments, layers, channels, config, runtime, on_progress or ignore_progress)
    table = LatencyTable(machine=machine, runtime=runtime.title, network=key, **measured)
    try:
        write_table(path, table)
    except OSError as error:
        logger.warning("the times of the layers are not kept for the next time: %s", error)
    return table


def _on_cpu(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    moved: tuple[Any, ...] = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), arguments)
    return moved


@dataclass(frozen=True, kw_only=True)
class _TimedForm:
    """The network with every layer at one level: seconds of a call, of its layers, and of everything else."""

    layers: Mapping[str, float]
    others: float
    gathers: Sequence[RemainingGather]


def _measured(
    dense: nn.Module,
    arguments: tuple[Any, ...],
    layers: Sequence[SelectedLayer],
    channels: NetworkChannels,
    config: SparsifyConfig,
    runtime: ProfiledRuntime,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """The fields of a table that are measured."""
    orders = None if config.has_free_orders else network_orders(channels, layers, config)
    most = min(MOST_LEVELS, max((layer.largest_level for layer in layers), default=1))
    with tempfile.TemporaryDirectory(prefix="strucspars-latency-") as folder:
        files, gathers = [], []
        for level in range(1, most + 1):
            on_progress("exporting networks to time", level, most)
            levels = {layer.name: min(level, layer.largest_level) for layer in layers}
            form = dense if level == 1 else convert_(copied(dense), random_plan(layers, levels, orders, seed=0))
            program = inference_program(form, arguments, group_width=runtime.exporter.group_width)
            files.append(Path(folder) / f"level{level}{runtime.exporter.suffix}")
            runtime.exporter.write(program, files[-1])
            gathers.append(program.gathers)
        timed = runtime.timed(files, [tensor.numpy() for tensor in arguments], RULES, on_progress)
    forms = _divided(timed, gathers, {layer.name for layer in layers}, runtime)
    rest = forms[0].others
    copied_bytes = sum(gather.nbytes for form in forms for gather in form.gathers)
    # Noise can make this negative where next to nothing is copied.
    ms_per_byte = 1000 * max(0.0, sum(form.others - rest for form in forms)) / copied_bytes if copied_bytes else 0.0
    return {
        "dense_ms": 1000 * (rest + sum(forms[0].layers.values())),
        "layers": {
            layer.name: tuple(1000 * form.layers.get(layer.name, 0.0) for form in forms[: layer.largest_level])
            for layer in layers
        },
        "shuffles": tuple(_shuffles(channels, layers, config, ms_per_byte)),
    }


def _divided(
    files: Sequence[TimedFile], gathers: Sequence[Sequence[RemainingGather]], names: set[str], runtime: ProfiledRuntime
) -> list[_TimedForm]:
    """The time of every file, divided among its layers."""
    low, usual, high = files[0].seconds
    if high - low > NOTABLE_SPREAD * usual:
        logger.warning(
            "the dense network takes %.2f to %.2f ms: the machine seems busy, so the milliseconds are uncertain; to "
            "measure again when it is idle, empty %s",
            1000 * low,
            1000 * high,
            cache_folder(),
        )
    # Profiling takes time itself, of every network the same share.
    scale = sum(file.seconds[1] for file in files) / sum(file.profiled for file in files)
    forms = []
    for file, found in zip(files, gathers, strict=True):
        if missing := names - set(file.layers):
            raise ValueError(
                f"the profile of {runtime.title} lacks layer {min(missing)!r}, so its time is not known; exclude the "
                "layer, use another runtime, or set budget='macs'"
            )
        layers = {name: scale * file.layers[name] for name in names}
        others = max(0.0, file.seconds[1] - sum(layers.values()))
        forms.append(_TimedForm(layers=layers, others=others, gathers=found))
    return forms


def _shuffles(
    channels: NetworkChannels, layers: Sequence[SelectedLayer], config: SparsifyConfig, ms_per_byte: float
) -> Iterator[Shuffle]:
    """Where layers make copies: on channels that are used in several orders."""
    for found, names in own_sides(channels, layers, config):
        free_sides = 0 if found.is_fixed else 1
        if len(names) > free_sides:
            yield Shuffle(ms_per_byte * found.num_bytes, names, free_sides)
