"""`strucspars report`: a page that shows what runs learned."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from strucspars.cli.console import Debug, Json, Output, examples, from_home

EXAMPLES = examples(
    "strucspars report runs/demo",
    "strucspars report runs/demo runs/demo-dense --out comparison",
    "strucspars report runs/cifar10-resnet20-* --out cifar10-report",
)


def report_runs(paths: Sequence[Path], *, out: Path | None = None) -> tuple[Path, dict[str, Any]]:
    """Write the report of some runs; returns its page, and a document for scripts.

    Args:
        paths: run folders.
        out: folder to write to; None: `report` in the run folder, or here for several.

    Raises:
        ValueError: one is no run folder, is damaged, or is named twice.
        OSError: the report cannot be written; an earlier one is kept.
    """
    from strucspars.report.reading import read_run
    from strucspars.report.writing import write_report

    folders = [path.expanduser() for path in paths]
    runs = [read_run(folder) for folder in folders]
    default = folders[0] / "report" if len(folders) == 1 else Path("report")
    written = write_report(runs, out or default)
    return written.page, {
        "page": str(written.page),
        "files": [str(file) for file in written.files],
        "runs": [
            {"folder": str(run.path), "page": str(page), "state": run.state}
            for run, page in zip(runs, written.run_pages, strict=True)
        ],
    }


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, finished or not.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder to write.", show_default="RUN/report for one run, report for several", callback=from_home
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a page that shows what runs have learned, and every figure and table of it as files.

    The page is one HTML file that needs no network. An earlier report in the folder is replaced. Several runs are
    compared on a page of their own, beside the paper's numbers.
    """
    page, document = report_runs(runs, out=out)
    Output(as_json=as_json).outcome(str(page), document)
