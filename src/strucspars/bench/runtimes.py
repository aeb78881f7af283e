"""The runtimes that can be timed: what they are called, whether they are there, and how a network gets into them."""

import difflib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn

from strucspars.convert.fold import fold
from strucspars.cost.gathers import FoldReport, fold_report
from strucspars.export.checked import ExportReport, export


@final
class InferenceForms:
    """A network's folded graph, and its files for other runtimes, as a user would export them.

    Args:
        model: in eval mode.
        example: one image.
        folder: of the files; it must be there, and belong to this network alone.
        widen_groups_below: run groups narrower than so many channels as wider ones, as `fold` does; None: as an
            export does by default.
    """

    def __init__(
        self, model: nn.Module, example: torch.Tensor, folder: Path, *, widen_groups_below: int | None = None
    ) -> None:
        self.model, self.example = model, example
        self._folder, self._widen_groups_below = folder, widen_groups_below

    @cached_property
    def folded(self) -> fx.GraphModule:
        """The inference graph."""
        return fold(self.model, self.example, widen_groups_below=self._widen_groups_below or 1)

    @cached_property
    def report(self) -> FoldReport:
        """What folding has left."""
        return fold_report(self.folded)

    @cached_property
    def onnx(self) -> ExportReport:
        """The network as an ONNX file of any batch size."""
        return self._exported("onnx", "network.onnx")

    @cached_property
    def openvino(self) -> ExportReport:
        """The network as OpenVINO's files, of any batch size."""
        return self._exported("openvino", "network.xml")

    def _exported(self, format: str, name: str) -> ExportReport:
        return export(
            self.model,
            self._folder / name,
            example_inputs=self.example,
            format=format,
            widen_groups_below=self._widen_groups_below,
        )


Images = npt.NDArray[np.float32]
Program = Callable[[Images], Images]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a program is made for.

    Attributes:
        batch: images of one call.
        threads: that it may use.
    """

    batch: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class GathersLeft:
    """The channel shuffles in the graph that a runtime runs.

    Attributes:
        count: how many remain.
        nbytes: what they copy for one image.
    """

    count: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Something that runs networks in float32.

    Attributes:
        name: on the command line and in files.
        title: in tables.
        package: what it imports.
        install: the command that installs it.
        prepare: makes a program of a network: images in, outputs out.
        gathers: those of the graph that the program runs; runtimes do not all get the same one.
    """

    name: str
    title: str
    package: str
    install: str
    prepare: Callable[[InferenceForms, Target], Program]
    gathers: Callable[[InferenceForms], GathersLeft]

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported."""
        return importlib.util.find_spec(self.package) is not None


def known_runtime(name: str) -> Runtime:
    """The runtime of this name.

    Raises:
        ValueError: there is none; the message suggests one.

    >>> known_runtime("onnxruntime").title
    'ONNX Runtime'
    """
    if name not in RUNTIMES:
        near = difflib.get_close_matches(name, RUNTIMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no runtime {name!r}; {hint}Runtimes are {', '.join(RUNTIMES)}")
    return RUNTIMES[name]


def split_by_presence(runtimes: Sequence[Runtime]) -> tuple[list[Runtime], list[Runtime]]:
    """Those that are installed, and those that are not."""
    present = [runtime for runtime in runtimes if runtime.is_installed]
    return present, [runtime for runtime in runtimes if runtime not in present]


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let PyTorch use so many threads; it knows one number for the whole process."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _eager_program(forms: InferenceForms, target: Target) -> Program:
    folded = forms.folded

    def program(images: Images) -> Images:
        with torch.inference_mode():
            outputs: Images = folded(torch.from_numpy(images)).numpy()
            return outputs

    return program


def _compiled_program(forms: InferenceForms, target: Target) -> Program:
    from torch._inductor import config

    compiled = torch.compile(forms.folded, dynamic=False)
    # Freezing makes constants of the weights, which are laid out once as the kernels want them. Given to torch.compile
    # as an option it has no effect: it must hold while the first call compiles.
    with torch.no_grad(), config.patch(freezing=True):
        compiled(torch.zeros(target.batch, *forms.example.shape[1:]))

    def program(images: Images) -> Images:
        with torch.no_grad():
            outputs: Images = compiled(torch.from_numpy(images)).numpy()
            return outputs

    return program


def _onnxruntime_program(forms: InferenceForms, target: Target) -> Program:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = target.threads, 1
    session = onnxruntime.InferenceSession(forms.onnx.path, options, providers=["CPUExecutionProvider"])
    (name,) = (node.name for node in session.get_inputs())

    def program(images: Images) -> Images:
        outputs: Images = session.run(None, {name: images})[0]
        return outputs

    return program


def _openvino_program(forms: InferenceForms, target: Target) -> Program:
    import openvino

    core = openvino.Core()
    model = core.read_model(forms.openvino.path)
    model.reshape([target.batch, *forms.example.shape[1:]])
    settings = {
        # It would choose bfloat16 by itself where the processor has it.
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": target.threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = core.compile_model(model, "CPU", settings)

    def program(images: Images) -> Images:
        outputs: Images = compiled(images)[0]
        return outputs

    return program


def _gathers_of_fold(forms: InferenceForms) -> GathersLeft:
    """Those of the folded graph, which PyTorch runs itself."""
    return GathersLeft(count=len(forms.report.gathers), nbytes=forms.report.gathered_bytes)


def _gathers_of_file(report: ExportReport) -> GathersLeft:
    return GathersLeft(count=report.num_gathers, nbytes=report.gathered_bytes)


RUNTIMES: Mapping[str, Runtime] = MappingProxyType(
    {
        runtime.name: runtime
        for runtime in (
            Runtime(
                name="onnxruntime",
                title="ONNX Runtime",
                package="onnxruntime",
                install="pip install onnxruntime",
                prepare=_onnxruntime_program,
                gathers=lambda forms: _gathers_of_file(forms.onnx),
            ),
            Runtime(
                name="pytorch",
                title="PyTorch",
                package="torch",
                install="pip install torch",
                prepare=_eager_program,
                gathers=_gathers_of_fold,
            ),
            Runtime(
                name="torch-compile",
                title="torch.compile",
                package="torch",
                install="pip install torch",
                prepare=_compiled_program,
                gathers=_gathers_of_fold,
            ),
            Runtime(
                name="openvino",
                title="OpenVINO",
                package="openvino",
                install="pip install 'strucspars[openvino]'",
                prepare=_openvino_program,
                gathers=lambda forms: _gathers_of_file(forms.openvino),
            ),
        )
    }
)
