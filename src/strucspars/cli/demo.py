"""`strucspars demo`: the whole pipeline on the digits, and whether it keeps its promises."""

from pathlib import Path
from typing import Annotated

import typer

from strucspars.cli.options import Debug, Json, Overrides, Quiet, Seeds, examples, from_home, parsed_seeds
from strucspars.cli.output import Output

EXAMPLES = examples("strucspars demo", "strucspars demo --seeds 0,1,2 --out demo-runs")


def demo(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="The folder to put the run folders in.", callback=from_home)] = Path("runs"),
    seeds: Seeds = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small network on the embedded digits, compress it by half, and compare. Takes minutes on a laptop."""
    from strucspars.cli.demonstration import check_promises, demonstrated, report_of_demo

    output = Output(as_json=as_json, quiet=quiet)
    pairs = demonstrated(overrides or [], out=out, seeds=None if seeds is None else parsed_seeds(seeds), output=output)
    page = report_of_demo(pairs, out=out / "report")
    text = "\n\n".join((*(pair.text() for pair in pairs), f"{page}  what was learned, to look at in a browser"))
    output.outcome(text, {"demos": [pair.document() for pair in pairs], "report": str(page)})
    check_promises(pairs)
