"""`strucspars reproduce`: run the recipes of a table of the paper, and print their numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strucspars.cli import console, run

if TYPE_CHECKING:
    from strucspars.paper.experiments import Experiment
    from strucspars.train.recipe import Recipe

# What `reproduce` decides for every row, and what to use instead of an override.
OWN_KEYS = {
    "name": "or use strucspars run",
    "seed": "--seeds names the seeds",
    "sparsify.from_run": "or use strucspars run",
}


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """A row of a table, as runs by folder, one per seed; `sources` are runs whose first stage these reuse."""

    name: str
    recipes: Mapping[Path, Recipe]
    sources: Mapping[Path, Recipe]


def planned_rows(
    table: str, *, patterns: Sequence[str] | None, seeds: Sequence[int], overrides: Sequence[str], out: Path
) -> list[PlannedRow]:
    """The runs of the rows that fit the patterns (None: the usual ones), one per seed, by folder in `out`."""
    from strucspars.paper.published import base_row, selected_rows
    from strucspars.train.recipe_reading import override_keys

    for override in overrides:
        for key in OWN_KEYS.keys() & set(override_keys(override)):
            raise ValueError(f"{override!r}: every row has its own {key}; leave it out, {OWN_KEYS[key]}")

    def recipes(name: str) -> dict[Path, Recipe]:
        return {out / run.run_name(recipe): recipe for recipe in run.seeded_recipes(name, overrides, seeds)}

    planned = []
    for name in selected_rows(table, patterns):
        own, base = recipes(name), base_row(name)
        sources = {} if base is None else recipes(base)
        if base is not None:
            own = {
                path: replace(recipe, sparsify=replace(recipe.sparsify, from_run=str(source)))
                for (path, recipe), source in zip(own.items(), sources, strict=True)
            }
        planned.append(PlannedRow(name=name, recipes=own, sources=sources))
    return planned


def reproduce_rows(
    table: str, planned: Sequence[PlannedRow], *, jobs: int, output: console.Output, as_markdown: bool
) -> run.Outcomes:
    """Run what is not finished, sources first, and print the table; returns the outcomes."""
    from strucspars.paper.experiments import FinishedRun, experiments_of

    recipes = {path: recipe for row in planned for path, recipe in row.sources.items()}
    recipes |= {path: recipe for row in planned for path, recipe in row.recipes.items()}
    outcomes = run.run_all(recipes, jobs=jobs, output=output)
    finished = run.finished_runs(outcomes)
    ordered = dict.fromkeys([*(path for row in planned for path in row.recipes), *recipes])
    runs = [FinishedRun(path, recipes[path], finished[path]) for path in ordered if path in finished]
    wanted = {row.name for row in planned}
    output.outcome(*table_outcome(table, wanted, experiments_of(runs), run.failed_runs(outcomes), {}, as_markdown))
    return outcomes


def collect_rows(table: str, patterns: Sequence[str], out: Path, *, as_markdown: bool) -> tuple[str, dict[str, Any]]:
    """The table of the finished runs in a folder, as a text and as a document; runs nothing."""
    from strucspars.paper.experiments import collected
    from strucspars.paper.published import selected_rows, table_rows

    found = collected(out, table_rows(table))
    wanted = set(selected_rows(table, patterns))
    if not any(each.recipe.name in wanted for each in found.experiments):
        raise ValueError(
            f"{out} has no finished run of {table} that fits {', '.join(patterns)}; --out names the folder of the run "
            "folders, --list shows their progress"
        )
    return table_outcome(table, wanted, found.experiments, found.unreadable, found.not_counted, as_markdown)


def table_outcome(
    table: str,
    wanted: set[str],
    experiments: Sequence[Experiment],
    failed: Mapping[Path, str],
    not_counted: Mapping[Path, str],
    as_markdown: bool,
) -> tuple[str, dict[str, Any]]:
    """A table of the `wanted` recipes, as a text and as a document; other experiments are only compared with."""
    from strucspars.paper.experiments import comparison_document
    from strucspars.report.tables import TERMINAL_WIDTH, comparison_table

    rows = [each for each in experiments if each.recipe.name in wanted]
    compared = comparison_table(table, rows, experiments)
    parts = []
    if rows and as_markdown:
        parts += [compared.markdown(), *compared.notes]
    elif rows:
        parts.append(compared.text(TERMINAL_WIDTH))
    for words, reasons in (("not finished", failed), ("not counted", not_counted)):
        parts.append("\n".join(f"{words}: {path} ({reason})" for path, reason in reasons.items()))
    return "\n\n".join(filter(None, parts)), {
        "table": table,
        "rows": comparison_document(table, rows, experiments),
        "failed": [{"folder": str(path), "error": reason} for path, reason in failed.items()],
        "not_counted": [{"folder": str(path), "reason": reason} for path, reason in not_counted.items()],
    }


def list_rows(planned: Sequence[PlannedRow]) -> tuple[str, dict[str, Any]]:
    """The rows and the progress of their runs, as a text and as a document."""
    from strucspars.cost.text_table import Column, text_table
    from strucspars.train.run_folder import RunFolder

    states = [(row.name, run.run_state(RunFolder(path)), str(path)) for row in planned for path in row.recipes]
    columns = zip(("row", "state", "folder"), zip(*states, strict=True), strict=True)
    text = text_table([Column(title, cells, is_text=True) for title, cells in columns])
    rows = [
        {"row": name, "folder": path, "state": state, "is_finished": state == run.FINISHED}
        for name, state, path in states
    ]
    return text, {"rows": rows}


EXAMPLES = console.examples(
    "strucspars reproduce table1 --list",
    "strucspars reproduce table1 --rows 'cifar10-resnet56-*' --seeds 0,1,2 --jobs 4 data.root=~/cifar10",
    "strucspars reproduce table3 data.root=~/cifar10",
    "strucspars reproduce table1 --collect --out results/cifar10",
)


class Table(StrEnum):
    """Tables of the paper that are made of runs."""

    table1 = "table1"
    table2 = "table2"
    table3 = "table3"
    table5 = "table5"


def reproduce(
    table: Annotated[
        Table, typer.Argument(help="1: CIFAR-10, 2: ImageNet, 3: other channel shuffles, 5: accuracy at every stage.")
    ],
    overrides: console.Overrides = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Rows by name or pattern.", show_default="those on CIFAR-10 if there are any"),
    ] = None,
    seeds: console.Seeds = None,
    jobs: console.Jobs = 1,
    out: console.OutFolder = Path("runs"),
    only_list: Annotated[bool, typer.Option("--list", help="List the rows and their progress; run nothing.")] = False,
    collect: Annotated[
        bool, typer.Option("--collect", help="Show the finished runs of all seeds in the folder; run nothing.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    quiet: console.Quiet = False,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Run the recipes of a table of the paper, or resume them, and print their numbers beside the paper's."""
    output = console.Output(as_json=as_json, quiet=quiet)
    if collect and (overrides or seeds is not None or only_list):
        raise ValueError("--collect shows finished runs: leave out overrides, --seeds and --list")
    if only_list and markdown:
        raise ValueError("--markdown is for a table of results: leave out --list")
    # Listing and collecting show all rows by default; running starts the usual ones.
    usual = ["*"] if only_list or collect else None
    patterns = [pattern.strip() for pattern in rows.split(",")] if rows is not None else usual
    if collect:
        output.outcome(*collect_rows(table.value, patterns or ["*"], out, as_markdown=markdown))
        return
    wanted = console.parse_seeds(seeds) or [0]
    planned = planned_rows(table.value, patterns=patterns, seeds=wanted, overrides=overrides or [], out=out)
    if only_list:
        output.outcome(*list_rows(planned))
        return
    run.raise_failures(reproduce_rows(table.value, planned, jobs=jobs, output=output, as_markdown=markdown))
