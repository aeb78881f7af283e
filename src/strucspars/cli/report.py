"""`strucspars report`: runs become a page to look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from strucspars.cli.console import Debug, Json, Output, examples, from_home
from strucspars.report.reading import RunData, read_run, shared_problems
from strucspars.report.writing import WrittenReport, write_report


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A report, and what it is about.

    Attributes:
        runs: as they were read.
        written: where the report lies.
    """

    runs: tuple[RunData, ...]
    written: WrittenReport

    def remarks(self) -> list[str]:
        """What could not be shown, a line each."""
        return shared_problems({str(run.path): run.problems for run in self.runs})


def reported_runs(paths: Sequence[Path], *, out: Path | None = None) -> Reported:
    """Write the report of some runs.

    Args:
        paths: run folders.
        out: folder to write to; None: `report` in the run folder, or here for several.

    Raises:
        ValueError: one is no run folder, or is named twice.
        OSError: the report cannot be written; an earlier one is kept.
    """
    folders = [path.expanduser() for path in paths]
    runs = tuple(read_run(folder) for folder in folders)
    default = folders[0] / "report" if len(folders) == 1 else Path("report")
    return Reported(runs=runs, written=write_report(runs, out or default))


def document(outcome: Reported) -> dict[str, Any]:
    """A report for scripts."""
    written = outcome.written
    return {
        "page": str(written.page),
        "files": [str(file) for file in written.files],
        "runs": [
            {"folder": str(run.path), "page": str(page), "state": run.state, "problems": list(run.problems)}
            for run, page in zip(outcome.runs, written.run_pages, strict=True)
        ],
    }


EXAMPLES = examples(
    "strucspars report runs/demo",
    "strucspars report runs/demo runs/demo-dense --out comparison",
    "strucspars report runs/cifar10-resnet20-* --out cifar10-report",
)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, finished or not.", show_default=False)
    ],
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
    compared on a page of their own, beside the paper's numbers. What is damaged or missing in a run folder is named on
    the page; the rest is shown.
    """
    from strucspars.cli.report import document, reported_runs

    output = Output(as_json=as_json)
    outcome = reported_runs(runs, out=out)
    for remark in outcome.remarks():
        output.remark(remark)
    output.outcome(str(outcome.written.page), document(outcome))
