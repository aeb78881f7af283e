"""`strucspars report`: a page that shows what runs learned."""

from pathlib import Path
from typing import Annotated

import typer

from strucspars.cli.console import Debug, Json, Output, examples, from_home

EXAMPLES = examples(
    "strucspars report runs/demo",
    "strucspars report runs/demo runs/demo-dense --out comparison",
    "strucspars report runs/cifar10-resnet20-* --out cifar10-report",
)


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
    from strucspars.report.page import write_report
    from strucspars.report.reading import read_run

    folders = [path.expanduser() for path in runs]
    read = [read_run(folder) for folder in folders]
    default = folders[0] / "report" if len(folders) == 1 else Path("report")
    written = write_report(read, out or default)
    document = {
        "page": str(written.page),
        "files": [str(file) for file in written.files],
        "runs": [
            {"folder": str(run.path), "page": str(page), "state": run.state}
            for run, page in zip(read, written.run_pages, strict=True)
        ],
    }
    Output(as_json=as_json).outcome(str(written.page), document)
