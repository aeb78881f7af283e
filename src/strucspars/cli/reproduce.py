"""`strucspars reproduce`: a table of the paper, ours beside theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from strucspars.cli.console import Debug, Jobs, Json, Output, Overrides, Quiet, Seeds, examples, from_home, parse_seeds
from strucspars.cli.paper_comparison import compared
from strucspars.cli.run import Outcomes, failed_runs, finished_runs, run_all, run_name, run_state
from strucspars.cli.run_collection import FinishedRun, check_one_protocol, collected
from strucspars.cli.table_rows import first_stage_source, selected_rows, table_rows, teacher_row
from strucspars.cost.text_table import Column, text_table
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import override_keys, read_recipe

# What `reproduce` decides for every row.
OWN_KEYS = ("name", "seed", "sparsify.from_run", "finetune.teacher")


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """A row of a table, as runs.

    Attributes:
        name: of its recipe.
        recipes: by run folder, one per seed.
        first: runs that these ones build on, by their first stage or as teachers; they come before.
    """

    name: str
    recipes: dict[Path, Recipe]
    first: dict[Path, Recipe]


def planned_rows(
    table: str, *, patterns: Sequence[str] | None, seeds: Sequence[int], overrides: Sequence[str], out: Path
) -> list[PlannedRow]:
    """The runs of a table.

    Args:
        table: such as `table1`.
        patterns: of the wanted rows; None for the usual ones.
        seeds: one run each.
        overrides: of all recipes.
        out: folder of the run folders.

    Raises:
        ValueError: a pattern fits no row, or an override is of what every row has of its own.
    """
    _check_overrides(overrides)

    def recipes(name: str) -> dict[Path, Recipe]:
        seeded = [read_recipe(name, [*overrides, f"seed={seed}"]) for seed in seeds]
        return {out / run_name(recipe): recipe for recipe in seeded}

    planned = []
    for name in selected_rows(table, patterns):
        own = recipes(name)
        first: dict[Path, Recipe] = {}
        source, teacher = first_stage_source(name), teacher_row(name)
        if source is not None:
            sources = recipes(source)
            own = dict(zip(own, map(_with_first_stage_of, own.values(), sources), strict=True))
            first |= sources
        if teacher is not None:
            teachers = recipes(teacher)
            own = dict(zip(own, map(_taught_by, own.values(), teachers), strict=True))
            first |= teachers
        planned.append(PlannedRow(name=name, recipes=own, first=first))
    return planned


def _check_overrides(overrides: Sequence[str]) -> None:
    for override in overrides:
        own = [key for key in override_keys(override) if key in OWN_KEYS]
        if own:
            raise ValueError(f"{override!r}: every row has its own {own[0]}; leave it out{_remedy(own[0])}")


def _remedy(key: str) -> str:
    """Where to say it instead."""
    return ", --seeds names the seeds" if key == "seed" else ", or use strucspars run"


def _with_first_stage_of(recipe: Recipe, folder: Path) -> Recipe:
    return replace(recipe, sparsify=replace(recipe.sparsify, from_run=str(folder)))


def _taught_by(recipe: Recipe, folder: Path) -> Recipe:
    return replace(recipe, finetune=replace(recipe.finetune, teacher=str(folder)))


def check_planned(planned: Sequence[PlannedRow], out: Path) -> None:
    """Look for finished runs that would make a row a mixture: before the training, not after it.

    Raises:
        ValueError: runs of one row would follow different protocols.
    """
    there = collected(out, [row.name for row in planned]).rows
    for row in planned:
        for path, recipe in row.recipes.items():
            # What lies in its own folder, the run itself refuses.
            others = {run.path: run.recipe for run in there.get(row.name, ()) if run.path != path}
            check_one_protocol({**others, path: recipe})


def reproduced(planned: Sequence[PlannedRow], *, jobs: int, output: Output) -> Outcomes:
    """Run what is not finished: first what others build on, these as soon as they can begin."""
    first: dict[Path, Recipe] = {}
    then: dict[Path, Recipe] = {}
    for row in planned:
        first |= row.first
        (then if row.first else first).update(row.recipes)
    return run_all(first | then, jobs=jobs, output=output)


def reproduced_table(
    table: str, planned: Sequence[PlannedRow], outcomes: Outcomes, out: Path, *, as_markdown: bool
) -> tuple[str, dict[str, Any]]:
    """What was run, beside the paper, as a text and as a document."""
    finished = finished_runs(outcomes)
    runs = {
        path: FinishedRun(path, recipe, finished[path])
        for row in planned
        for path, recipe in row.recipes.items()
        if path in finished
    }
    rows = {row.name: [runs[path] for path in row.recipes if path in runs] for row in planned}
    return compared(
        table, rows, collected(out, table_rows(table)), failed=failed_runs(outcomes), as_markdown=as_markdown
    )


def collected_table(table: str, patterns: Sequence[str], out: Path, *, as_markdown: bool) -> tuple[str, dict[str, Any]]:
    """What is finished in a folder, beside the paper, as a text and as a document; runs nothing.

    Raises:
        ValueError: nothing of that table is finished there, or runs of one row follow different protocols.
    """
    collection = collected(out, table_rows(table))
    rows = {name: collection.comparable(name) for name in selected_rows(table, patterns)}
    if not any(rows.values()):
        raise ValueError(
            f"{out} has no finished run of {table} that fits {', '.join(patterns)}; --out names the folder of the run "
            "folders, --list tells how far they are"
        )
    return compared(
        table, rows, collection, failed=collection.unreadable, not_counted=collection.misnamed, as_markdown=as_markdown
    )


def listed(planned: Sequence[PlannedRow]) -> tuple[str, dict[str, Any]]:
    """The rows and how far their runs are, as a text and as a document."""
    states = [(row.name, path, run_state(path)) for row in planned for path in row.recipes]
    text = text_table(
        [
            Column("row", [name for name, _, _ in states], is_text=True),
            Column("state", [state.words for _, _, state in states], is_text=True),
            Column("folder", [str(path) for _, path, _ in states], is_text=True),
        ]
    )
    rows = [
        {"row": name, "folder": str(path), "state": state.words, "is_finished": state.is_finished}
        for name, path, state in states
    ]
    return text, {"rows": rows}


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
    from strucspars.cli.reproduce import (
        check_planned,
        collected_table,
        listed,
        planned_rows,
        reproduced,
        reproduced_table,
    )
    from strucspars.cli.run import raise_failures

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
        seeds=parse_seeds(seeds) or [0],
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
