"""Programs of torch.export in one file."""

import io
from pathlib import Path
from typing import final

import torch

from strucspars.export.program import (
    Arguments,
    Exporter,
    InferenceProgram,
    Run,
    first_line,
    output_tensors,
    without_chatter,
)


@final
class TorchExporter(Exporter):
    """A program that `torch.export.load` reads, without the network's code, for the CPU.

    It returns plain tuples where the network has named ones, whose class is code of the network.
    """

    suffix = ".pt2"
    has_names = False

    def runtime(self) -> str:
        """The version of torch."""
        return f"torch.export {torch.__version__}"

    def write(self, program: InferenceProgram, path: Path) -> None:
        """Write the file."""
        # In memory first: torch's own writer does not say that a disk is full.
        buffer = io.BytesIO()
        try:
            with without_chatter():
                torch.export.save(program.exported, buffer, extra_files=dict(program.metadata))
        # Unsupported parts of a program raise errors of many kinds, without a common base.
        except Exception as error:
            raise ValueError(
                f"torch.export cannot write the network: {first_line(error)}; try another format"
            ) from error
        path.write_bytes(buffer.getvalue())

    def load(self, path: Path) -> Run:
        """The program of a file."""
        with without_chatter():
            # Not by its name: torch complains about some of them.
            program = torch.export.load(io.BytesIO(path.read_bytes())).module()

        def run(arguments: Arguments) -> list[torch.Tensor]:
            with torch.no_grad():
                return output_tensors(program(*(tensor.clone() for tensor in arguments)))

        return run
