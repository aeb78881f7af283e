"""Which implementation every convolution of a folded network runs by, on one GPU, as measured there."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from strucspars.convert.fusion import (
    ConvStep,
    fuse_convolutions_,
    gathers_between,
    with_gather_read,
    with_gather_written,
)
from strucspars.convert.seams import SeamSite, join_seam_, seam_of, seam_sites
from strucspars.cost.counting import fresh_arguments
from strucspars.kernels.fused_conv import FusedConv
from strucspars.kernels.kernel import Call, Float32Products
from strucspars.kernels.registry import ConvProblem
from strucspars.kernels.seam import SeamCall, SeamProblem
from strucspars.kernels.tuning import Problem, Timed
from strucspars.sparsify.calibration import OnProgress, ignore_progress

# What every convolution of the dense form runs as, with zeros between the groups.
DENSE = ("cudnn", "dense")
# The implementations of a problem, the quickest first: `Tuner.timed`.
TimesOf = Callable[[Problem], Sequence[Timed]]


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """How a layer, or several in one pass, run; milliseconds so, and of dense layers."""

    layer: str
    kernel: str
    option: str
    ms: float
    dense_ms: float


@dataclass(frozen=True)
class PlannedForm:
    """A graph of fused convolutions, and how each runs."""

    graph: fx.GraphModule
    layers: tuple[LayerChoice, ...]


@dataclass(frozen=True)
class FusedGraph:
    """A graph of fused convolutions, the steps of its calls, and what they are called with."""

    graph: fx.GraphModule
    steps: dict[fx.Node, ConvStep]
    calls: dict[ConvStep, Call]


def fused_graph(folded: fx.GraphModule, arguments: tuple[Any, ...], products: Float32Products) -> FusedGraph:
    """A copy of a folded graph with fused convolutions, run once to see their inputs."""
    graph = copy.deepcopy(folded)
    steps = fuse_convolutions_(graph)
    return FusedGraph(graph, steps, _recorded_calls(graph, arguments, products))


def _recorded_calls(
    graph: fx.GraphModule, arguments: tuple[Any, ...], products: Float32Products
) -> dict[ConvStep, Call]:
    calls: dict[ConvStep, Call] = {}

    class Recorder(fx.Interpreter):
        def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            step = self.fetch_attr(target)
            if isinstance(step, ConvStep):
                x = args[0]
                calls[step] = Call(
                    input_shape=tuple(x.shape),
                    has_residual=len(args) > 1,
                    dtype=x.dtype,
                    device=x.device,
                    float32_products=products if x.dtype == torch.float32 else "ieee",
                )
            return super().call_module(target, args, kwargs)

    with torch.no_grad():
        Recorder(graph).run(*fresh_arguments(arguments))
    return calls


def dense_form(fused: FusedGraph) -> PlannedForm:
    """Every convolution by cuDNN, dense: the network without groups."""
    for step, call in fused.calls.items():
        step.run = ConvProblem(step.conv, call).prepare(*DENSE)
    return PlannedForm(fused.graph, ())


def quickest_form(fused: FusedGraph, timed: TimesOf, on_progress: OnProgress = ignore_progress) -> PlannedForm:
    """Every convolution, or several together, by what takes the least time for it."""
    for done, (step, call) in enumerate(fused.calls.items()):
        on_progress("timing kernels", done, len(fused.calls))
        timed(ConvProblem(step.conv, call))
    _place_gathers_(fused, timed)
    layers = {}
    for node, step in fused.steps.items():
        problem = ConvProblem(step.conv, fused.calls[step])
        # Nothing computes some convolutions, such as those in double precision: they stay plain operations.
        if times := timed(problem):
            step.run = problem.prepare(times[0].kernel, times[0].option)
            dense_ms = next((each.ms for each in times if (each.kernel, each.option) == DENSE), math.inf)
            layers[node] = LayerChoice(
                layer=step.name, kernel=times[0].kernel, option=times[0].option, ms=times[0].ms, dense_ms=dense_ms
            )
    sites = list(seam_sites(fused.steps))
    for done, site in enumerate(sites):
        on_progress("timing seams", done, len(sites))
        _join_if_quicker_(fused, site, timed, layers)
    return PlannedForm(fused.graph, tuple(layers.values()))


def _place_gathers_(fused: FusedGraph, timed: TimesOf) -> None:
    """Let every gather between two convolutions be absorbed by the one that takes less time for it, in place."""

    def ms(pair: tuple[FusedConv, FusedConv], calls: tuple[Call, Call]) -> float:
        times = [timed(ConvProblem(conv, call)) for conv, call in zip(pair, calls, strict=True)]
        return sum(each[0].ms if each else math.inf for each in times)

    for writer, reader in gathers_between(fused.steps):
        read = with_gather_read(writer.conv, reader.conv)
        written = with_gather_written(*read)
        calls = fused.calls[writer], fused.calls[reader]
        quicker = read if ms(read, calls) <= ms(written, calls) else written
        writer.set_conv(quicker[0])
        reader.set_conv(quicker[1])


def _join_if_quicker_(fused: FusedGraph, site: SeamSite, timed: TimesOf, layers: dict[fx.Node, LayerChoice]) -> None:
    """Compute the convolutions of a seam, or two of them, together where that takes less time, in place."""
    saved: dict[SeamSite, tuple[float, SeamProblem, LayerChoice]] = {}
    for part in site.parts():
        nodes = [node for node in (part.shortcut, part.first, part.second) if node is not None]
        problem = SeamProblem(seam_of(part, fused.steps), seam_call(part, fused))
        times = timed(problem)
        if not times or not all(node in layers for node in nodes):
            continue
        choice = LayerChoice(
            layer=" + ".join(layers[node].layer for node in nodes),
            kernel=times[0].kernel,
            option=times[0].option,
            ms=times[0].ms,
            dense_ms=sum(layers[node].dense_ms for node in nodes),
        )
        saved[part] = sum(layers[node].ms for node in nodes) - choice.ms, problem, choice
    if not saved:
        return
    part, (gain, problem, choice) = max(saved.items(), key=lambda item: item[1][0])
    if gain > 0:
        join_seam_(fused.graph, part, fused.steps).run = problem.prepare(choice.kernel, choice.option)
        layers[part.first] = choice
        for node in (part.shortcut, part.second):
            if node is not None:
                layers.pop(node, None)


def seam_call(site: SeamSite, fused: FusedGraph) -> SeamCall:
    """What a seam is called with."""
    first = fused.calls[fused.steps[site.first]]
    size = first.input_shape[2:] if site.shortcut is None else fused.calls[fused.steps[site.shortcut]].input_shape[2:]
    return SeamCall(first=first, other_size=(size[0], size[1]))
