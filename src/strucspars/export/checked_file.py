"""The end of every export: write, run, compare, and only then give the file its name."""

import os
from collections.abc import Callable
from pathlib import Path

from strucspars.export.agreement import Run, checked_agreement
from strucspars.export.export_report import SUFFIXES, ExportReport, Format
from strucspars.export.inference_program import InferenceProgram
from strucspars.export.whole_files import written_whole

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
    with written_whole(path) as unfinished:
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
