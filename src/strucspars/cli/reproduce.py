"""`strucspars reproduce`: a table of the paper, ours beside theirs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from strucspars.cli.options import Debug, Jobs, Json, Overrides, Quiet, Seeds, examples, from_home, parsed_seeds
from strucspars.cli.output import Output

EXAMPLES = examples(
    "strucspars reproduce table1 --list",
    "strucspars reproduce table1 --rows 'cifar10-resnet56-*' --seeds 0,1,2 --jobs 4 data.root=~/cifar10",
    "strucspars reproduce table3 data.root=~/cifar10",
    "strucspars reproduce table1 --collect --out results/cifar10",
)


class Table(StrEnum):
    """Tables of the paper that are made of runs, and one of ours."""

    table1 = "table1"
    table2 = "table2"
    table3 = "table3"
    table5 = "table5"
    variants = "variants"


def reproduce(
    table: Annotated[
        Table,
        typer.Argument(
            help="1: CIFAR-10, 2: ImageNet, 3: other channel shuffles, 5: accuracy at every stage; "
            "variants: other ways to train networks on CIFAR-10, which the paper does not have."
        ),
    ],
    overrides: Overrides = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Rows by name or pattern.", show_default="those on CIFAR-10 if there are any"),
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    out: Annotated[Path, typer.Option(help="The folder of the run folders.", callback=from_home)] = Path("runs"),
    only_list: Annotated[bool, typer.Option("--list", help="List the rows and how far they are; run nothing.")] = False,
    collect: Annotated[
        bool, typer.Option("--collect", help="Show the finished runs of all seeds in the folder; run nothing.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table for a page instead of a terminal.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the recipes of a table of the paper, or go on with them, and print ours beside the paper's numbers."""
    from strucspars.cli.reproduction import (
        check_planned,
        collected_table,
        listed,
        planned_rows,
        reproduced,
        reproduced_table,
    )
    from strucspars.cli.running import raise_failures

    output = Output(as_json=as_json, quiet=quiet)
    if collect and (overrides or seeds is not None or only_list):
        raise ValueError("--collect shows what is there: leave out overrides, --seeds and --list")
    if only_list and markdown:
        raise ValueError("--markdown is for a table of results: leave out --list")
    # To see what there is, everything; to run, the usual ones.
    usual = ["*"] if only_list or collect else None
    patterns = [pattern.strip() for pattern in rows.split(",")] if rows is not None else usual
    if collect:
        output.outcome(*collected_table(table.value, patterns or ["*"], out, as_markdown=markdown))
        return
    planned = planned_rows(
        table.value,
        patterns=patterns,
        seeds=[0] if seeds is None else parsed_seeds(seeds),
        overrides=overrides or [],
        out=out,
    )
    if only_list:
        output.outcome(*listed(planned))
        return
    check_planned(planned, out)
    outcomes = reproduced(planned, jobs=jobs, output=output)
    output.outcome(*reproduced_table(table.value, planned, outcomes, out, as_markdown=markdown))
    raise_failures(outcomes)
