"""`strucspars report`: runs become a page to look at."""

from pathlib import Path
from typing import Annotated

import typer

from strucspars.cli.options import Debug, Json, examples, from_home
from strucspars.cli.output import Output

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
    from strucspars.cli.reporting import document, reported_runs

    output = Output(as_json=as_json)
    outcome = reported_runs(runs, out=out)
    for remark in outcome.remarks():
        output.remark(remark)
    output.outcome(str(outcome.written.page), document(outcome))
