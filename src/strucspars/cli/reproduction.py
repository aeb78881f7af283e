"""The paper's tables as runs: which recipes, in which folders, in which order."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from strucspars.cli.output import Output
from strucspars.cli.run_state import run_state
from strucspars.cli.running import Outcomes, run_all, run_name, run_seed
from strucspars.measure.text_table import Column, text_table
from strucspars.runs.folder import RunFolder
from strucspars.training.outcome import RunSummary, read_summary
from strucspars.training.paper_rows import PAPER_ROWS
from strucspars.training.recipe import Ablation, Recipe
from strucspars.training.recipe_reading import read_recipe

# Networks whose channel shuffles Table 3 replaces by others. CIFAR-10's is ours: the paper has ImageNet's only.
ABLATED = ("cifar10-resnet56-60", "imagenet-resnet50-65", "imagenet-resnet101-65")
# Networks that are trained in other ways too, which no table of the paper has, and these ways.
VARIED = {
    "cifar10-resnet20-dense": ("modern",),
    "cifar10-resnet20-40": ("low-rate", "distilled", "modern", "modern-distilled", "paper-solver", "slimming"),
    "cifar10-resnet56-dense": ("modern",),
    "cifar10-resnet56-60": ("low-rate", "distilled", "modern", "modern-distilled", "slimming"),
}
# Of these ways: with a dense teacher; with a teacher trained likewise; with a first stage of their own.
DISTILLED = "distilled"
MODERN = "modern"
FROM_THE_START = ("paper-solver", "slimming")
USUAL_ROWS = "cifar10-*"


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


def table_rows(table: str) -> list[str]:
    """The recipes of a table.

    >>> table_rows("table3")[:3]
    ['cifar10-resnet56-60', 'cifar10-resnet56-60-from-scratch', 'cifar10-resnet56-60-shufflenet']
    """
    tables_1_and_2 = [name for name, row in PAPER_ROWS.items() if row.table in (1, 2)]
    if table == "table5":
        return [name for name in tables_1_and_2 if read_recipe(name).kind == "strucspars"]
    if table == "table3":
        return [_ablated(name, ablation) for name in ABLATED for ablation in get_args(Ablation)]
    if table == "variants":
        return [row for name, ways in VARIED.items() for row in (name, *(f"{name}-{way}" for way in ways))]
    return [name for name in tables_1_and_2 if f"table{PAPER_ROWS[name].table}" == table]


def selected_rows(table: str, patterns: Sequence[str] | None) -> list[str]:
    """The rows of a table whose name fits a pattern; by default those on CIFAR-10 if there are any, else all.

    Raises:
        ValueError: a pattern fits none.
    """
    rows = table_rows(table)
    if patterns is None:
        return [name for name in rows if fnmatchcase(name, USUAL_ROWS)] or rows
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in rows):
            near = difflib.get_close_matches(pattern, rows, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"--rows: {table} has no row {pattern!r}; {hint}--list shows all")
    return [name for name in rows if any(fnmatchcase(name, pattern) for pattern in patterns)]


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
    """

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


def _with_first_stage_of(recipe: Recipe, folder: Path) -> Recipe:
    return replace(recipe, sparsify=replace(recipe.sparsify, from_run=str(folder)))


def _taught_by(recipe: Recipe, folder: Path) -> Recipe:
    return replace(recipe, finetune=replace(recipe.finetune, teacher=str(folder)))


def first_stage_source(name: str) -> str | None:
    """The row whose first stage a row takes over; None if it has its own, or none.

    >>> first_stage_source("cifar10-resnet56-60-random"), first_stage_source("cifar10-resnet56-60-slimming")
    ('cifar10-resnet56-60', None)
    """
    base = base_row(name)
    if base is None or base.endswith("-dense") or name.endswith(FROM_THE_START):
        return None
    return base


def base_row(name: str) -> str | None:
    """The row that a row varies; None if it stands for itself.

    >>> base_row("cifar10-resnet20-40-slimming"), base_row("cifar10-resnet20-40")
    ('cifar10-resnet20-40', None)
    """
    return next((base for base in (*ABLATED, *VARIED) if name.startswith(f"{base}-")), None)


def teacher_row(name: str) -> str | None:
    """The dense network that a row is distilled from; None if it is not.

    >>> teacher_row("cifar10-resnet20-40-distilled"), teacher_row("cifar10-resnet20-40-modern-distilled")
    ('cifar10-resnet20-dense', 'cifar10-resnet20-dense-modern')
    """
    if not name.endswith(f"-{DISTILLED}"):
        return None
    data, network, *_ = name.split("-")
    dense = f"{data}-{network}-dense"
    return f"{dense}-{MODERN}" if name.endswith(f"-{MODERN}-{DISTILLED}") else dense


def reproduced(planned: Sequence[PlannedRow], *, jobs: int, output: Output) -> Outcomes:
    """Run what is not finished: first what others build on."""
    first: dict[Path, Recipe] = {}
    then: dict[Path, Recipe] = {}
    for row in planned:
        first |= row.first
        (then if row.first else first).update(row.recipes)
    outcomes = dict(run_all(first, jobs=jobs, output=output))
    return outcomes | dict(run_all(then, jobs=jobs, output=output))


def collected(table: str, *, patterns: Sequence[str] | None, out: Path) -> tuple[list[PlannedRow], Outcomes]:
    """The rows of a table that have finished runs in a folder, with every seed that is there; runs nothing."""
    rows: list[PlannedRow] = []
    outcomes: dict[Path, RunSummary | Exception] = {}
    for name in selected_rows(table, ["*"] if patterns is None else patterns):
        found: dict[Path, Recipe] = {}
        for path in _folders_of(name, out):
            summary = read_summary(RunFolder(path))
            if summary is not None:
                found[path] = read_recipe(RunFolder(path).recipe_path)
                outcomes[path] = summary
        if found:
            rows.append(PlannedRow(name=name, recipes=found, first={}))
    return rows, outcomes


def _folders_of(name: str, out: Path) -> list[Path]:
    """The run folders of a row, by seed."""
    seeds = {path: run_seed(path.name, name) for path in out.glob(f"{name}*")}
    return sorted((path for path, seed in seeds.items() if seed is not None), key=lambda path: seeds[path] or 0)


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


def _ablated(name: str, ablation: str) -> str:
    return name if ablation == "finetune" else f"{name}-{ablation}"
