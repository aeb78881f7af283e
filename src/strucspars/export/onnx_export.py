"""`export_onnx`: one ONNX file, checked in ONNX Runtime before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from strucspars.export.agreement import Run
from strucspars.export.checked_file import checked_path, write_checked
from strucspars.export.default_device import new_tensors_on_cpu
from strucspars.export.example_batch import Arguments
from strucspars.export.export_report import ExportReport
from strucspars.export.inference_program import InferenceProgram, inference_program
from strucspars.export.onnx_graph import check_one_gather_per_shuffle, drop_origins_, name_batch_axis_, rename_values_
from strucspars.export.quiet import first_line, without_chatter
from strucspars.measure.counting import ExampleInputs

if TYPE_CHECKING:
    import onnx

# What one protobuf message may hold; above that the weights go into a second file.
LARGEST_MESSAGE = 2**31 - 2**20
# The fast convolutions of ONNX Runtime work on blocks of 16 channels.
WIDEN_GROUPS_BELOW = 16


@new_tensors_on_cpu()
def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: ExampleInputs,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    widen_groups_below: int | None = None,
) -> ExportReport:
    """Write a network as one ONNX file that provably computes the same.

    The network is folded first; every shuffle that remains is one Gather. The file is run in ONNX Runtime on random
    inputs and compared with the network before it appears under its name; on any failure nothing is left, and a file
    that was there before stays. Weights of more than 2 GB go into a second file, `path` with `.data` at its end.

    Args:
        model: converted, masked or dense, or a graph that `fold` has made; on any device, and it stays as it is.
        path: the file to write.
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`, all tensors.
        input_names: one per input; None: the names of the arguments of `forward`, or "input_1", "input_2" and so on
            where `*args` takes some of them.
        output_names: one per output; None: "output", "output_1" and so on, or the keys of a dictionary of tensors.
        dynamic_batch: let the batch have any size. It is the first axis of the first input, and of all that are as
            long there.
        widen_groups_below: run groups of fewer channels as wider ones, as in `fold`. None: 16, below which ONNX
            Runtime is slow; a graph that is folded already stays as it is.

    Raises:
        ValueError: the network cannot be exported, or ONNX Runtime computes something else.
        OSError: the file cannot be written.

    >>> import strucspars as ss, tempfile
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 5, 1))
    >>> model = ss.convert_(model, ss.one_shot_plan(model, target=0.3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = export_onnx(model, f"{folder}/small.onnx", torch.randn(2, 3, 8, 8))
    >>> report.num_gathers, report.agreement.batch_sizes, report.agreement.max_relative_error < 1e-4
    (0, (2, 1), True)
    """
    path = checked_path(path, "onnx")
    program = inference_program(
        model,
        example_inputs,
        dynamic_batch=dynamic_batch,
        widen_groups_below=widen_groups_below,
        usual_group_width=WIDEN_GROUPS_BELOW,
        input_names=input_names,
        output_names=output_names,
    )
    proto = onnx_model(program)
    return write_checked(
        program,
        path,
        format="onnx",
        runtime=_runtime(),
        write=lambda unfinished: write_onnx(proto, unfinished),
        runner=onnx_runner,
    )


def onnx_model(program: InferenceProgram) -> onnx.ModelProto:
    """The ONNX form of a network, with its names and metadata."""
    try:
        with without_chatter():
            written = torch.onnx.export(program.exported, dynamo=True, verbose=False, optimize=True)
            assert written is not None
            model: onnx.ModelProto = written.model_proto
    # Operations without an ONNX form show in errors of many kinds, of which no base is promised.
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(f"the network cannot be written as ONNX: {first_line(cause)}; try export_torch") from error
    rename_values_(model.graph, program.input_names, program.output_names)
    name_batch_axis_(model.graph, program.batch.is_batched)
    check_one_gather_per_shuffle(model.graph, program.exported)
    drop_origins_(model)
    for key, value in program.metadata.items():
        model.metadata_props.add(key=key, value=value)
    return model


def write_onnx(model: onnx.ModelProto, path: Path) -> None:
    """Write an ONNX model; one too large for a single message gets a second file for its weights."""
    import onnx

    if model.ByteSize() <= LARGEST_MESSAGE:
        path.write_bytes(model.SerializeToString())
    else:
        onnx.save_model(model, path, save_as_external_data=True, location=f"{path.name}.data")


def _runtime() -> str:
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__}"


def onnx_runner(path: Path) -> Run:
    """ONNX Runtime with a file, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    # The library's errors share no base but this.
    except Exception as error:
        raise ValueError(
            f"{_runtime()} cannot run {path.name}, so that it could not be checked: {first_line(error)}; a network in "
            "half or double precision can be exported as model.float()"
        ) from error
    names = [value.name for value in session.get_inputs()]

    def run(arguments: Arguments) -> list[torch.Tensor]:
        arrays = [tensor.numpy() for tensor in arguments]
        return [torch.from_numpy(array) for array in session.run(None, dict(zip(names, arrays, strict=True)))]

    return run
