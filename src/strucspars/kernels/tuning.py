"""Choose among implementations by measurement."""

import logging
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from strucspars.kernels.kernel import Call
from strucspars.kernels.launch import is_interpreted, only_compiled
from strucspars.kernels.stock import stock_settings

logger = logging.getLogger(__name__)

# Milliseconds of a function that starts work on the device.
Timer = Callable[[Callable[[], object]], float]
Outputs = Tensor | Sequence[Tensor | None]

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


class Problem(ABC):
    """Something to compute, with several implementations."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of inputs and outputs."""

    @property
    @abstractmethod
    def signature(self) -> str:
        """A text that differs wherever the times of implementations may."""

    @abstractmethod
    def inputs(self) -> tuple[Tensor | None, ...]:
        """Random inputs; not zeros, on which GPUs run faster."""

    @abstractmethod
    def expected(self, inputs: tuple[Tensor | None, ...]) -> Outputs:
        """What the plain implementation gives in float32."""

    @abstractmethod
    def implementations(self) -> Iterator[tuple[str, str]]:
        """Kernels and options, by name."""

    @abstractmethod
    def prepare(self, kernel: str, option: str) -> Callable[..., Outputs]:
        """An implementation, ready to run."""


def timed_implementations(problem: Problem, timer: Timer) -> list[Timed]:
    """All implementations that compute the problem correctly, the quickest first.

    Correct means close to the plain one in float32. What raises an error or is off is left out, and logged.
    """
    inputs = problem.inputs()
    found = []
    with torch.no_grad(), stock_settings():
        _compile_ahead(problem, inputs)
        expected = _tensors(problem.expected(inputs))
        for kernel, option in problem.implementations():
            try:
                run = problem.prepare(kernel, option)
                _poison_memory(expected, problem.dtype)
                off = max(map(largest_difference, _tensors(run(*inputs)), expected))
                if off <= TOLERANCE[problem.dtype]:
                    found.append(Timed(timer(partial(run, *inputs)), kernel, option))
                    logger.debug("%s: %s", problem.signature, found[-1])
                else:
                    logger.warning("%s (%s) is off by %.2g of the largest entry and not used", kernel, option, off)
            # Kernels can ask for more memory or registers than a GPU has, and libraries lack engines for some shapes.
            except Exception as error:
                logger.info("%s (%s) is not used: %s: %s", kernel, option, type(error).__name__, error)
    return sorted(found)


def _compile_ahead(problem: Problem, inputs: tuple[Tensor | None, ...]) -> None:
    """Compile all kernels of a problem at once; those that fail do so again when they are to run."""
    if is_interpreted() or not any(each is not None and each.is_cuda for each in inputs):
        return
    with only_compiled():
        for kernel, option in problem.implementations():
            with suppress(Exception):
                problem.prepare(kernel, option)(*inputs)


def _tensors(outputs: Outputs) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [each for each in outputs if each is not None]


def _poison_memory(results: list[Tensor], dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the allocator hands out next, where another implementation left correct results."""
    # All at once: the next one would be in the memory of the one before.
    _ = [torch.full_like(result, torch.nan, dtype=dtype) for result in results]


def random_tensor(shape: tuple[int, ...], call: Call, *, seed: int) -> Tensor:
    """Random numbers, channels last."""
    generator = torch.Generator(call.device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=call.device, dtype=call.dtype)
    return values.to(memory_format=torch.channels_last)


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest entry expected; infinite where a result is not finite."""
    if not expected.numel():
        return 0.0
    off = ((found - expected).abs().max() / expected.abs().max()).item()
    return off if off == off else float("inf")


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
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # untyped in torch
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
