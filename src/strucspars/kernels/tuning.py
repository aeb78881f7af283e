"""Choose among the implementations of a fused convolution by measurement."""

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from strucspars.kernels.fused_conv import FusedConv, reference
from strucspars.kernels.kernel import Call, Run
from strucspars.kernels.library import library_settings
from strucspars.kernels.registry import KERNELS, implementations

logger = logging.getLogger(__name__)

# Milliseconds of a function that starts work on the device.
Timer = Callable[[Callable[[], object]], float]

# Differences from the result in float32, as fractions of its largest entry, that rounding explains.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}

# For one implementation.
CALLS_PER_GRAPH = 10
MEASURED_MS = 10.0
LEAST_REPLAYS = 5
MOST_REPLAYS = 50


@dataclass(frozen=True, order=True)
class Timed:
    """An implementation, by the names of its kernel and option, and the milliseconds of a call."""

    ms: float
    kernel: str
    option: str

    def prepare(self, conv: FusedConv, call: Call) -> Run:
        """The convolution, ready to run."""
        return KERNELS.find(self.kernel).prepare(conv, call, self.option)


def timed_implementations(conv: FusedConv, call: Call, timer: Timer) -> list[Timed]:
    """All implementations that compute the convolution correctly, the quickest first.

    Correct means close to the plain one in float32. What raises an error or is off is left out, and logged.
    """
    x, residual = example_tensors(conv, call)
    found = []
    with torch.no_grad(), library_settings():
        expected = _in_float32(conv, x, residual)
        for kernel, option in implementations(conv, call):
            try:
                run = KERNELS.find(kernel).prepare(conv, call, option)
                _poison_memory(expected, call.dtype)
                off = largest_difference(run(x, residual), expected)
                if off <= TOLERANCE[call.dtype]:
                    found.append(Timed(timer(partial(run, x, residual)), kernel, option))
                else:
                    logger.warning("%s (%s) is off by %.2g of the largest entry and not used", kernel, option, off)
            # Kernels can ask for more memory or registers than a GPU has, and libraries lack engines for some shapes.
            except Exception as error:
                logger.info("%s (%s) is not used: %s: %s", kernel, option, type(error).__name__, error)
    return sorted(found)


def _poison_memory(result: Tensor, dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the allocator hands out next, where another implementation left correct results."""
    torch.full_like(result, torch.nan, dtype=dtype)


def example_tensors(conv: FusedConv, call: Call) -> tuple[Tensor, Tensor | None]:
    """Random input and residual; not zeros, on which GPUs run faster."""
    generator = torch.Generator(call.device).manual_seed(0)
    batch, _, height, width = call.input_shape

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=call.device, dtype=call.dtype)
        return values.to(memory_format=torch.channels_last)

    out_shape = (batch, conv.out_channels, *conv.conv_size(height, width))
    return drawn(*call.input_shape), drawn(*out_shape) if call.has_residual else None


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest entry expected; infinite where a result is not finite."""
    if not expected.numel():
        return 0.0
    off = ((found - expected).abs().max() / expected.abs().max()).item()
    return off if off == off else float("inf")


def _in_float32(conv: FusedConv, x: Tensor, residual: Tensor | None) -> Tensor:
    exact = replace(conv, weight=conv.weight.float(), bias=conv.bias.float())
    return reference(exact, x.float(), None if residual is None else residual.float())


def graph_timer(run: Callable[[], object]) -> float:
    """Milliseconds of a call on the current GPU: replays of a CUDA graph, without the time that launches take."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            run()
    first = _replayed_ms(graph)
    replays = min(max(round(MEASURED_MS / max(first, 1e-3)), LEAST_REPLAYS), MOST_REPLAYS)
    return statistics.median(_replayed_ms(graph) for _ in range(replays)) / CALLS_PER_GRAPH


def _replayed_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
