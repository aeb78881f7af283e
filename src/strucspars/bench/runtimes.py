"""The runtimes that can be timed, and how a network is loaded into them."""

import difflib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn

from strucspars.convert.fold import fold
from strucspars.cost.gathers import fold_report
from strucspars.export.checked import EXPORTERS, ExportReport, export
from strucspars.export.int8 import Int8

Images = npt.NDArray[np.float32]
Program = Callable[[Images], Images]

INT8 = "-int8"
_SHORT_TITLES = {"onnxruntime": "ORT", "openvino": "OV"}
# Speed does not depend on the images that int8 files are calibrated with.
CALIBRATION_IMAGES = 40


@dataclass(frozen=True, eq=False)
class InferenceForms:
    """A network's folded graph, and its files for other runtimes, as a user would export them, in one folder."""

    model: nn.Module
    example: torch.Tensor
    folder: Path
    widen_groups_below: int | None = None
    _reports: dict[str, ExportReport] = field(default_factory=dict, init=False)

    @cached_property
    def folded(self) -> fx.GraphModule:
        """The inference graph."""
        return fold(self.model, self.example, widen_groups_below=self.widen_groups_below or 1)

    def exported(self, format: str, *, int8: bool = False) -> ExportReport:
        """The network as a file for any batch size, written on the first call; in int8 calibrated on random images."""
        name = format + INT8 * int8
        if name not in self._reports:
            generator = torch.Generator().manual_seed(0)
            images = torch.randn(CALIBRATION_IMAGES, *self.example.shape[1:], generator=generator)
            # Random networks have no classes to agree on: a wrong file is one whose outputs are far off.
            quantize = Int8([images], min_agreement=0.0, max_output_error=0.5) if int8 else None
            self._reports[name] = export(
                self.model,
                self.folder / f"{name}{EXPORTERS.find(format).suffix}",
                example_inputs=self.example,
                format=format,
                widen_groups_below=self.widen_groups_below,
                quantize=quantize,
            )
        return self._reports[name]


@dataclass(frozen=True)
class Runtime:
    """A runtime for networks in float32 or int8, and how to import and install it.

    `prepare` makes a program of a network, for so many images per call and threads, of a file of this `format` or of
    the folded graph.
    """

    name: str
    title: str
    package: str
    install: str
    prepare: Callable[..., Program]
    format: str | None = None
    is_int8: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported."""
        return importlib.util.find_spec(self.package) is not None

    def gathers(self, forms: InferenceForms) -> tuple[int, int]:
        """The number of channel shuffles in the graph that the program runs, and the bytes they copy for one image."""
        if self.format is None:
            folded = fold_report(forms.folded)
            return len(folded.gathers), folded.gathered_bytes
        exported = forms.exported(self.format, int8=self.is_int8)
        return exported.num_gathers, exported.gathered_bytes

    def nbytes(self, forms: InferenceForms) -> int | None:
        """The size of the file that the program runs; None where there is none."""
        return None if self.format is None else forms.exported(self.format, int8=self.is_int8).nbytes

    def in_int8(self) -> "Runtime":
        """The same runtime for int8 files."""
        return replace(
            self,
            name=self.name + INT8,
            # The tables are as wide as the page.
            title=f"{_SHORT_TITLES[self.name]} int8",
            prepare=partial(self.prepare, int8=True),
            is_int8=True,
        )


def known_runtime(name: str) -> Runtime:
    """The runtime of this name, or a `ValueError` that suggests one."""
    if name not in RUNTIMES:
        near = difflib.get_close_matches(name, RUNTIMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no runtime {name!r}; {hint}Runtimes are {', '.join(RUNTIMES)}")
    return RUNTIMES[name]


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let PyTorch use so many threads; the number is process-wide."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compiled_program(forms: InferenceForms, images_per_call: int, threads: int) -> Program:
    from torch._inductor import config

    program = partial(_numpy_outputs, torch.compile(forms.folded, dynamic=False))
    # Freezing makes constants of the weights, which are laid out once as the kernels want them. Given to torch.compile
    # as an option it has no effect: it must hold while the first call compiles.
    with config.patch(freezing=True):
        program(np.zeros((images_per_call, *forms.example.shape[1:]), np.float32))
    return program


@torch.inference_mode()
def _numpy_outputs(module: Callable[[torch.Tensor], torch.Tensor], images: Images) -> Images:
    outputs: Images = module(torch.from_numpy(images)).numpy()
    return outputs


def _onnx_program(forms: InferenceForms, images_per_call: int, threads: int, *, int8: bool = False) -> Program:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    path = forms.exported("onnx", int8=int8).path
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (name,) = (node.name for node in session.get_inputs())
    return lambda images: session.run(None, {name: images})[0]


def _openvino_program(forms: InferenceForms, images_per_call: int, threads: int, *, int8: bool = False) -> Program:
    import openvino

    core = openvino.Core()
    model = core.read_model(forms.exported("openvino", int8=int8).path)
    model.reshape([images_per_call, *forms.example.shape[1:]])
    settings = {
        # It would choose bfloat16 by itself where the processor has it.
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = core.compile_model(model, "CPU", settings)
    return lambda images: compiled(images)[0]


def _eager_program(forms: InferenceForms, images_per_call: int, threads: int) -> Program:
    return partial(_numpy_outputs, forms.folded)


_RUNTIMES = (
    Runtime("onnxruntime", "ONNX Runtime", "onnxruntime", "pip install 'strucspars[onnx]'", _onnx_program, "onnx"),
    Runtime("pytorch", "PyTorch", "torch", "pip install torch", _eager_program),
    Runtime("torch-compile", "torch.compile", "torch", "pip install torch", _compiled_program),
    Runtime("openvino", "OpenVINO", "openvino", "pip install 'strucspars[openvino]'", _openvino_program, "openvino"),
)
_INT8_RUNTIMES = tuple(runtime.in_int8() for runtime in _RUNTIMES if runtime.format is not None)
RUNTIMES = {runtime.name: runtime for runtime in (*_RUNTIMES, *_INT8_RUNTIMES)}
