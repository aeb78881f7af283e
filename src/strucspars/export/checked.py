"""The end of every export: write, run, compare, and only then give the file its name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strucspars.export.agreement import Agreement, Run, checked_agreement
from strucspars.export.program import InferenceProgram
from strucspars.io.files import replace_file

Format = Literal["onnx", "openvino", "torch"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """A file that was written, and how closely it agrees with the network. `str()` of it is a short text.

    Attributes:
        path: the file.
        format: what kind it is.
        runtime: name and version of what it was checked in.
        nbytes: its size, with that of its companions.
        num_gathers: channel shuffles that folding left in it.
        gathered_bytes: what those copy for the example inputs.
        agreement: of the runtime with the network.

    >>> agreement = Agreement(
    ...     batch_sizes=(2, 1), max_relative_error=2e-7, tolerance=1e-4, num_outputs=1, num_winners=3
    ... )
    >>> print(ExportReport(path=Path("model.onnx"), format="onnx", runtime="ONNX Runtime 1.31.0", nbytes=12345,
    ...                    num_gathers=1, gathered_bytes=4096, agreement=agreement))
    model.onnx  12,345 bytes
    gathers     1, 4,096 bytes
    checked in  ONNX Runtime 1.31.0, batch sizes 2 and 1
    off by      2.0e-07 of the largest output; 1e-04 is allowed
    winners     the same in 3 rows
    """

    path: Path
    format: Format
    runtime: str
    nbytes: int
    num_gathers: int
    gathered_bytes: int
    agreement: Agreement

    def __str__(self) -> str:
        found = self.agreement
        sizes = " and ".join(str(size) for size in found.batch_sizes)
        gathers = f"{self.num_gathers}, {self.gathered_bytes:,} bytes" if self.num_gathers else "none"
        rows = [
            (self.path.name, f"{self.nbytes:,} bytes"),
            ("gathers", gathers),
            ("checked in", f"{self.runtime}, batch size{'s' if len(found.batch_sizes) > 1 else ''} {sizes}"),
            ("off by", f"{found.max_relative_error:.1e} of the largest output; {found.tolerance:.0e} is allowed"),
        ]
        if found.num_winners:
            rows.append(("winners", f"the same in {found.num_winners} row{'s' if found.num_winners > 1 else ''}"))
        width = max(len(title) for title, _ in rows)
        return "\n".join(f"{title:<{width}}  {text}" for title, text in rows)


# Our own, and those beside OpenVINO's graphs.
SUFFIXES_OF_WEIGHTS = (".safetensors", ".bin")


def checked_path(path: str | os.PathLike[str], format: Format) -> Path:
    """The path of a file to write, or a `ValueError` where it ends as files of another format of ours do.

    >>> checked_path("network.xml", "onnx")
    Traceback (most recent call last):
        ...
    ValueError: network.xml ends as files of another format do; write to network.onnx
    """
    path = Path(path)
    if path.suffix.lower() in {*SUFFIXES.values(), *SUFFIXES_OF_WEIGHTS} - {SUFFIXES[format]}:
        right = path.with_suffix(SUFFIXES[format])
        raise ValueError(f"{path} ends as files of another format do; write to {right}")
    return path


def write_checked(
    program: InferenceProgram,
    path: Path,
    *,
    format: Format,
    runtime: str,
    write: Callable[[Path], None],
    runner: Callable[[Path], Run],
) -> ExportReport:
    """Write a network in some format; the file appears only if its runtime computes what the network does.

    Args:
        program: the network.
        path: the file.
        format: of the file.
        runtime: name and version of what runs it.
        write: writes it under another name in an empty folder, with whatever companions it needs.
        runner: what runs it from there.

    Raises:
        ExportMismatch: the runtime computes something else.
        OSError: the file cannot be written.
    """
    with replace_file(path, follow_link=True) as unfinished:
        write(unfinished)
        agreement = checked_agreement(program.reference, runner(unfinished), program.batch, runtime=runtime, path=path)
        nbytes = sum(file.stat().st_size for file in unfinished.parent.iterdir())
    return ExportReport(
        path=path,
        format=format,
        runtime=runtime,
        nbytes=nbytes,
        num_gathers=len(program.gathers),
        gathered_bytes=sum(gather.nbytes for gather in program.gathers),
        agreement=agreement,
    )
