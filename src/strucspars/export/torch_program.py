"""`export_torch`: a program of torch.export in one file, checked before it gets its name."""

import io
import os
from pathlib import Path

import torch
from torch import nn

from strucspars.cost.counting import ExampleInputs
from strucspars.export.agreement import Run, output_tensors
from strucspars.export.checked import ExportReport, checked_path, write_checked
from strucspars.export.example_batch import Arguments
from strucspars.export.program import InferenceProgram, inference_program, new_tensors_on_cpu
from strucspars.export.quiet import first_line, without_chatter


@new_tensors_on_cpu()
def export_torch(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: ExampleInputs,
    *,
    dynamic_batch: bool = True,
    widen_groups_below: int | None = None,
) -> ExportReport:
    """Write a network as a program that `torch.export.load` reads, without the network's code.

    The network is folded first. The file is loaded again, run on random inputs and compared with the network before it
    appears under its name; on any failure nothing is left, and a file that was there before stays. The program is one
    for the CPU. It puts out plain tuples where the network has named ones: their class is code of the network.

    Args:
        model: converted, masked or dense, or a graph that `fold` has made; on any device, and it stays as it is.
        path: the file to write, usually with `.pt2` at its end.
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`, all tensors.
        dynamic_batch: let the batch have any size. It is the first axis of the first input, and of all that are as
            long there.
        widen_groups_below: run groups of fewer channels as wider ones, as in `fold`. None: no.

    Raises:
        ValueError: the network cannot be exported, or the program computes something else.
        OSError: the file cannot be written.

    >>> import strucspars as ss, tempfile
    >>> model = ss.ShuffledGroupConv2d(8, 8, 1, groups=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = export_torch(model, f"{folder}/layer.pt2", torch.randn(2, 8, 4, 4))
    ...     program = torch.export.load(f"{folder}/layer.pt2").module()
    >>> images = torch.randn(5, 8, 4, 4)
    >>> torch.allclose(program(images), model(images), atol=1e-5)
    True
    """
    path = checked_path(path, "torch")
    program = inference_program(
        model, example_inputs, dynamic_batch=dynamic_batch, widen_groups_below=widen_groups_below
    )
    return write_checked(
        program,
        path,
        format="torch",
        runtime=f"torch.export {torch.__version__}",
        write=lambda unfinished: _write(program, unfinished),
        runner=torch_runner,
    )


def _write(program: InferenceProgram, path: Path) -> None:
    # In memory first: where a disk is full, torch's own writer does not say so.
    buffer = io.BytesIO()
    try:
        with without_chatter():
            torch.export.save(program.exported, buffer, extra_files=dict(program.metadata))
    # What its format has no words for shows in errors of many kinds, of which no base is promised.
    except Exception as error:
        raise ValueError(f"torch.export cannot write the network: {first_line(error)}; try export_onnx") from error
    path.write_bytes(buffer.getvalue())


def torch_runner(path: Path) -> Run:
    """The program of a file."""
    with without_chatter():
        # Not by its name: torch complains about some of them.
        program = torch.export.load(io.BytesIO(path.read_bytes())).module()

    def run(arguments: Arguments) -> list[torch.Tensor]:
        with torch.no_grad():
            return output_tensors(program(*(tensor.clone() for tensor in arguments)))

    return run
