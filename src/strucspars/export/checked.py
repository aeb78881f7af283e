"""`export` and its formats. A file is renamed to its path only after its runtime agreed with the network."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from strucspars.convert.comparison import Comparison, compare_outputs
from strucspars.core.plan import Preprocessing
from strucspars.core.registry import Registry
from strucspars.cost.counting import ExampleInputs, fresh_arguments, undisturbed
from strucspars.export.int8 import Images, Int8, Int8Report, Int8Writer
from strucspars.export.onnx import OnnxExporter
from strucspars.export.openvino import OpenVinoExporter
from strucspars.export.program import (
    PREPROCESSING_KEY,
    ExampleBatch,
    Exporter,
    Inference,
    TorchExporter,
    first_line,
    inference_program,
    output_tensors,
)
from strucspars.io.files import replace_file

_BUILT_IN: Mapping[str, Exporter] = {"onnx": OnnxExporter(), "openvino": OpenVinoExporter(), "torch": TorchExporter()}
EXPORTERS = Registry("format", _BUILT_IN)


def register_exporter(name: str, exporter: Exporter) -> None:
    """Make a file format available as `ss.export(..., format=name)` and `strucspars export --format name`.

    >>> import io, strucspars as ss
    >>> from strucspars.export.program import Exporter
    >>> class Scripted(Exporter):
    ...     suffix = ".ts"
    ...     def runtime(self):
    ...         return "TorchScript"
    ...     def write(self, program, path):
    ...         torch.jit.trace(program.exported.module(), program.batch.arguments).save(path)
    ...     def load(self, path):
    ...         run = torch.jit.load(path)
    ...         return lambda arguments: [run(*arguments)]
    >>> ss.register_exporter("torchscript", Scripted())
    """
    EXPORTERS.register(name, exporter)


def find_exporter(format: str) -> Exporter:
    """The exporter of a format, by its name or as `package.module:exporter`."""
    exporter = EXPORTERS.find(format)
    if not isinstance(exporter, Exporter):
        raise ValueError(f"format {format!r} must name an instance of a subclass of Exporter, got {exporter!r}")
    return exporter


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How closely a runtime agrees with the network: the largest error of any output and batch size."""

    batch_sizes: tuple[int, ...]
    max_relative_error: float
    tolerance: float
    num_outputs: int


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """A file that was written, and how closely it agrees with the network. `str()` of it is a short text.

    The agreement of an int8 file is that of its graph in float32; `int8` has the file itself.

    >>> agreement = Agreement(batch_sizes=(2, 1), max_relative_error=2e-7, tolerance=1e-4, num_outputs=1)
    >>> print(ExportReport(path=Path("model.onnx"), format="onnx", runtime="ONNX Runtime 1.31.0", nbytes=12345,
    ...                    num_gathers=1, gathered_bytes=4096, agreement=agreement))
    model.onnx  12,345 bytes
    gathers     1, 4,096 bytes
    checked in  ONNX Runtime 1.31.0, batch sizes 2 and 1
    off by      2.0e-07 of the largest output; 1e-04 is allowed
    """

    path: Path
    format: str
    runtime: str
    nbytes: int
    num_gathers: int
    gathered_bytes: int
    agreement: Agreement
    int8: Int8Report | None = None

    def __str__(self) -> str:
        found = self.agreement
        sizes = f"batch size{'' if len(found.batch_sizes) == 1 else 's'} {' and '.join(map(str, found.batch_sizes))}"
        rows = {
            self.path.name: f"{self.nbytes:,} bytes",
            "gathers": f"{self.num_gathers}, {self.gathered_bytes:,} bytes" if self.num_gathers else "none",
            "checked in": f"{self.runtime}, {sizes}",
            "off by": f"{found.max_relative_error:.1e} of the largest output; {found.tolerance:.0e} is allowed",
        }
        if self.int8 is not None:
            rows["in float32"] = f"{self.int8.float32_nbytes:,} bytes"
            rows["int8"], *others = str(self.int8).splitlines()
            rows |= dict.fromkeys(others, "")
        width = max(map(len, rows))
        return "\n".join(f"{title:<{width}}  {text}" for title, text in rows.items())


class ExportMismatch(ValueError):
    """A runtime cannot run a file, or gives other outputs than the network."""


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    example_inputs: ExampleInputs,
    format: str | Exporter = "onnx",
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    widen_groups_below: int | None = None,
    preprocessing: Preprocessing | None = None,
    quantize: Int8 | Iterable[Images] | None = None,
) -> ExportReport:
    """Write a network as a file for a deployment runtime that provably computes the same.

    A copy of the network is folded first. The file is run in its runtime on random inputs and compared with the network
    before it gets its name; on any failure no file is left, and an existing file is kept.

    Args:
        model: converted, masked or dense, or a graph that `fold` has made; on any device.
        path: the file to write. It ends in `.onnx`, `.xml` (OpenVINO, with a `.bin` file beside it) or `.pt2` (torch).
            Weights of more than 2 GB in ONNX go into a second file, `path` with `.data` at its end.
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`, all tensors.
        format: "onnx", "openvino", "torch", the name of a registered exporter, `package.module:exporter`, or an
            exporter.
        input_names: one per input; None: the names of the arguments of `forward`, or "input_1", "input_2" and so on
            where `*args` takes some of them. A torch file keeps no names.
        output_names: one per output; None: "output", "output_1" and so on, or the keys of a dictionary of tensors.
        dynamic_batch: let the batch have any size. It is the first axis of the first input, and of all that are as
            long there.
        widen_groups_below: run groups of fewer channels as wider ones, as in `fold`. None: 16 for ONNX and OpenVINO,
            whose runtimes are slow with narrower groups, else 1; a graph that is folded already is not changed.
        preprocessing: of the network's images, such as `plan.preprocessing`. It is stored as JSON in the file's
            metadata under `strucspars.preprocessing`; the network itself does not apply it.
        quantize: write an int8 file for ONNX Runtime or OpenVINO: some hundred images in batches, as the network takes
            them, which decide the ranges of the numbers; or an `Int8`, with labelled images to check the accuracy on,
            and the limits. None: float32.

    Raises:
        ImportError: the runtime is not installed.
        ValueError: the network cannot be exported, or the runtime computes something else; an int8 file is less
            accurate than asked for.
        OSError: the file cannot be written.

    >>> import strucspars as ss, tempfile
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 5, 1))
    >>> model = ss.convert_(model, ss.one_shot_plan(model, target=0.3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = ss.export(model, f"{folder}/small.onnx", example_inputs=torch.randn(2, 3, 8, 8))
    >>> report.num_gathers, report.agreement.batch_sizes, report.agreement.max_relative_error < 1e-4
    (0, (2, 1), True)
    """
    exporter = find_exporter(format) if isinstance(format, str) else format
    name = format if isinstance(format, str) else type(format).__name__
    path = Path(path)
    if path.suffix != exporter.suffix:
        right = path.parent / f"{path.stem or 'network'}{exporter.suffix}"
        raise ValueError(f"a file of the format {name} ends in {exporter.suffix}, got {path}; write to {right}")
    if not exporter.has_names and (input_names is not None or output_names is not None):
        raise ValueError(f"a file of the format {name} keeps no input_names and output_names; leave them out")
    runtime = exporter.runtime()
    int8_writer = None if quantize is None else Int8Writer.of(exporter, quantize, format=name)
    # The network's code, torch.export and the readers of files must create tensors on the CPU.
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        program = inference_program(
            model,
            example_inputs,
            dynamic_batch=dynamic_batch,
            widen_groups_below=widen_groups_below,
            group_width=exporter.group_width if int8_writer is None else int8_writer.exporter.int8_group_width,
            input_names=input_names,
            output_names=output_names,
        )
        if preprocessing is not None:
            program.metadata[PREPROCESSING_KEY] = json.dumps(asdict(preprocessing))
        with replace_file(path, follow_link=True) as unfinished:
            (exporter.write if int8_writer is None else int8_writer.write_float32)(program, unfinished)
            load = partial(exporter.load, unfinished)
            agreement = check_agreement(program.reference, load, program.batch, runtime=runtime, path=path)
            int8 = None if int8_writer is None else int8_writer.write_int8(program.batch, unfinished)
            nbytes = sum(file.stat().st_size for file in unfinished.parent.iterdir())
    return ExportReport(
        path=path,
        format=name,
        runtime=runtime,
        nbytes=nbytes,
        num_gathers=len(program.gathers),
        gathered_bytes=sum(gather.nbytes for gather in program.gathers),
        agreement=agreement,
        int8=int8,
    )


def check_agreement(
    model: nn.Module, load: Callable[[], Inference], batch: ExampleBatch, *, runtime: str, path: Path
) -> Agreement:
    """Compare a runtime with the network, on the CPU, on random inputs like the example, at each batch size."""
    run: Inference | None = None
    compared: list[Comparison] = []
    for size in batch.sizes:
        inputs = batch.random_like(size)
        with undisturbed(model):
            expected = output_tensors(model(*fresh_arguments(inputs)))
        # Some runtimes compute double precision in single.
        expected = [right.float() if right.dtype == torch.float64 else right for right in expected]
        try:
            run = run or load()
            outputs = list(run(inputs))
        # Each runtime raises its own types of errors.
        except Exception as error:
            raise ExportMismatch(
                f"{runtime} cannot run the network at batch size {size}: {first_line(error)}; {path} is not written. "
                "Where the network's code fixes the batch size, pass dynamic_batch=False; export a network in half or "
                "double precision as model.float(); or try another format"
            ) from error
        compared.append(compare_outputs(outputs, expected))
        complaint = compared[-1].complaint
        if not complaint and not any(right.isfinite().any() for right in expected):
            complaint = "the network gives no finite number for inputs like the example, so nothing can be compared"
        if complaint:
            raise ExportMismatch(
                f"{runtime} computes something else than the network at batch size {size}: {complaint}; {path} is not "
                "written. Networks that draw random numbers in eval mode, or keep something from call to call, cannot "
                "be compared; otherwise try another format or version of the runtime, and compare "
                "fold(model, example_inputs) with the network"
            )
    return Agreement(
        batch_sizes=batch.sizes,
        max_relative_error=max(each.relative_error for each in compared),
        tolerance=max(each.tolerance for each in compared),
        num_outputs=len(expected),
    )
