"""`compile_for_gpu`: the inference graph of a network with the quickest exact implementation of every convolution."""

import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from strucspars.convert.comparison import compare_outputs, random_arguments
from strucspars.convert.fold import fold
from strucspars.cost.counting import ExampleInputs, arguments_of, fresh_arguments
from strucspars.cost.gathers import fold_report
from strucspars.cost.text_table import Column, text_table
from strucspars.export.gpu_plan import LayerChoice, TimesOf, dense_form, fused_graph, quickest_form
from strucspars.export.program import first_line
from strucspars.kernels.cache import Tuner
from strucspars.kernels.kernel import Float32Products
from strucspars.kernels.launch import has_triton
from strucspars.kernels.stock import stock_settings
from strucspars.kernels.tuning import Timer, graph_timer
from strucspars.nn.names import unwrapped
from strucspars.sparsify.calibration import OnProgress, ignore_progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """How a network runs on a GPU. `str()` of it is a table.

    Attributes:
        layers: its convolutions; none where all run dense.
        ms, dense_ms: milliseconds of the whole network as it runs, and with every convolution dense.
        fallback_reason: why the network runs as its folded graph in PyTorch; empty if it does not.
    """

    layers: tuple[LayerChoice, ...] = ()
    ms: float | None = None
    dense_ms: float | None = None
    fallback_reason: str = ""

    def __str__(self) -> str:
        if self.fallback_reason:
            return f"runs in PyTorch: {self.fallback_reason}"
        columns = [
            Column("layer", [each.layer for each in self.layers], is_text=True),
            Column("kernel", [f"{each.kernel} ({each.option})" for each in self.layers], is_text=True),
            Column("ms", [f"{each.ms:.4f}" for each in self.layers]),
            Column("dense ms", [f"{each.dense_ms:.4f}" for each in self.layers]),
        ]
        return f"{text_table(columns)}\n{self.ms:.3f} ms, {self.dense_ms:.3f} ms with every convolution dense"


@final
class GpuNetwork(nn.Module):
    """A network for inference with inputs of one shape, as `compile_for_gpu` makes it; `report` says how it runs.

    Inputs of other shapes, types or devices go through the folded graph in PyTorch, and a warning says so.
    """

    def __init__(self, folded: fx.GraphModule, run: "CapturedCall | None", report: GpuReport) -> None:
        super().__init__()
        self.folded = folded
        self._run = run
        self.report = report

    def forward(self, *arguments: Any) -> Any:
        """The outputs of the network, without gradients."""
        with torch.no_grad():
            if self._run is None:
                return self.folded(*arguments)
            if self._run.fits(arguments):
                return self._run(arguments)
            warnings.warn(
                f"compiled for {self._run.inputs}, called with {_described(arguments)}: this runs in PyTorch, slower; "
                "call compile_for_gpu for these inputs too",
                stacklevel=2,
            )
            return self.folded(*arguments)


def compile_for_gpu(
    model: nn.Module, example_inputs: ExampleInputs, *, on_progress: OnProgress = ignore_progress
) -> GpuNetwork:
    """Make an inference module that runs as fast as it can on this GPU, for inputs of the example's shape.

    The network is folded. Every convolution, together with the gather of channels, the addition and the ReLU around it,
    then runs by whichever exact implementation is the quickest here: cuDNN's, dense or grouped, or kernels in Triton.
    They are timed once for each GPU and version. The network with every convolution dense is timed too, and is used
    where it is faster. The result is compared with the network and captured as one CUDA graph.

    Half precision sums in float32. In float32, tensor cores multiply numbers as sums of three TF32 numbers, with errors
    as in float32, unless `torch.backends.cudnn.allow_tf32` is False; TF32 alone is never used.

    Args:
        model: converted, masked or dense, on the GPU; it does not change.
        example_inputs: a tensor or a tuple of positional arguments, on the GPU, in the precision of the model.
        on_progress: called as `on_progress(what, done, total)` while kernels are timed.

    Returns:
        A module that takes the same arguments. On a CPU, without Triton, or where the network cannot be traced, it runs
        the folded graph in PyTorch; a warning and its `report` say why.

    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 1))
    >>> with warnings.catch_warnings(action="ignore"):
    ...     compiled = ss.compile_for_gpu(model, torch.zeros(2, 3, 8, 8))
    >>> print(compiled.report)
    runs in PyTorch: the example inputs are on the CPU
    """
    model = unwrapped(model)
    arguments = arguments_of(model, example_inputs)
    with stock_settings():
        folded = fold(model, arguments)
    reason = _reason_against(arguments) or fold_report(folded).untraced_reason
    if not reason:
        device = _device(arguments)
        products: Float32Products = "tf32x3" if torch.backends.cudnn.allow_tf32 else "ieee"
        timed = Tuner(torch.cuda.get_device_name(device), graph_timer).timed
        with torch.cuda.device(device):
            try:
                run, report = planned(folded, arguments, timed, graph_timer, products=products, on_progress=on_progress)
                return GpuNetwork(folded, run, report)
            # Too little memory, and whatever else libraries refuse.
            except RuntimeError as error:
                reason = first_line(error)
    warnings.warn(f"compile_for_gpu falls back to PyTorch: {reason}", stacklevel=2)
    return GpuNetwork(folded, None, GpuReport(fallback_reason=reason))


def _device(arguments: tuple[Any, ...]) -> torch.device:
    return next(leaf.device for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))


def _reason_against(arguments: tuple[Any, ...]) -> str:
    """Why nothing can be chosen for these inputs; empty if it can."""
    devices = {leaf.device for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)}
    if len(devices) != 1:
        return f"the example inputs are on {len(devices)} devices"
    (device,) = devices
    if device.type == "cpu":
        return "the example inputs are on the CPU"
    return "" if has_triton(device) else f"Triton is not installed or does not support {device}"


class WrongResultError(RuntimeError):
    """A network as planned differs from the folded graph."""


def planned(
    folded: fx.GraphModule,
    arguments: tuple[Any, ...],
    timed: TimesOf,
    timer: Timer,
    *,
    products: Float32Products,
    on_progress: OnProgress = ignore_progress,
) -> tuple["CapturedCall", GpuReport]:
    """The quicker of two forms of a folded network: all convolutions dense, and each as it is the quickest."""
    with torch.no_grad(), stock_settings():
        forms = (
            dense_form(fused_graph(folded, arguments, products)),
            quickest_form(fused_graph(folded, arguments, products), timed, on_progress),
        )
        dense_ms, ms = (timer(partial(form.graph, *arguments)) for form in forms)
        form = forms[ms < dense_ms]
        run = CapturedCall(form.graph, arguments)
        _check(run, folded, arguments)
    return run, GpuReport(layers=form.layers, ms=min(ms, dense_ms), dense_ms=dense_ms)


def _check(run: "CapturedCall", folded: fx.GraphModule, arguments: tuple[Any, ...]) -> None:
    """Raise a `WrongResultError` unless outputs agree with the folded graph in float32, on the example and others."""
    exact = copy.deepcopy(folded).float()

    def in_float32(values: Any) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, values
        )

    for inputs in (arguments, random_arguments(arguments, in_double=False)):
        found = run(inputs)
        expected = exact(*fresh_arguments(in_float32(inputs)))
        expected = pytree.tree_map(
            lambda one, other: one.to(other.dtype) if isinstance(one, Tensor) else one, expected, found
        )
        if complaint := compare_outputs(found, expected, whole_numbers=False).complaint:
            raise WrongResultError(f"the network as planned differs from its folded graph: {complaint}")


@final
class CapturedCall:
    """A function for inputs of one shape, on a GPU captured as a CUDA graph. The outputs are copies."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.inputs = _described(arguments)
        self._static = pytree.tree_map_only(Tensor, _channels_last_copy, arguments)
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if _device(arguments).type == "cuda":
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Libraries choose algorithms and allocate memory in the first calls.
            for _ in range(3):
                self._function(*self._static)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._function(*self._static)

    def fits(self, arguments: tuple[Any, ...]) -> bool:
        """Whether it was made for such inputs."""
        return _described(arguments) == self.inputs

    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        """The outputs for inputs that fit."""
        for own, given in zip(pytree.tree_leaves(self._static), pytree.tree_leaves(arguments), strict=True):
            if isinstance(own, Tensor):
                own.copy_(given)
        self.replay()
        return pytree.tree_map_only(Tensor, torch.clone, self._outputs)

    def replay(self) -> None:
        """Compute the outputs of the last inputs again."""
        if self._graph is None:
            self._outputs = self._function(*self._static)
        else:
            self._graph.replay()


def _channels_last_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.channels_last if tensor.dim() == 4 else torch.preserve_format)


def _described(arguments: tuple[Any, ...]) -> tuple[object, ...]:
    """What must stay the same from call to call: shapes, types and devices of tensors, and all other values."""
    return tuple(
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)} on {leaf.device}"
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in pytree.tree_leaves(arguments)
    )
