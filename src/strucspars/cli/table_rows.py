"""Which recipes the paper's tables consist of, and ours; what they build on."""

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import get_args

from strucspars.train.paper_rows import PAPER_ROWS
from strucspars.train.recipe import Ablation
from strucspars.train.recipe_reading import read_recipe

# Networks whose channel shuffles Table 3 replaces by others. CIFAR-10's is ours: the paper has ImageNet's only.
ABLATED = ("cifar10-resnet56-60", "imagenet-resnet50-65", "imagenet-resnet101-65")
# Networks that are trained in other ways too, which no table of the paper has, and these ways.
VARIED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cifar10-resnet20-20": ("distilled",),
        "cifar10-resnet20-40": ("low-rate", "distilled", "modern", "paper-solver", "slimming"),
        "cifar10-resnet56-30": ("distilled",),
        "cifar10-resnet56-50": ("distilled",),
        "cifar10-resnet56-60": ("low-rate", "distilled", "slimming"),
        "cifar10-resnet56-70": ("distilled",),
        "cifar10-resnet110-60": ("distilled",),
    }
)
# Of these ways: with a dense teacher; of another method; with a first stage of their own.
DISTILLED = "distilled"
SLIMMING = "slimming"
FROM_THE_START = ("paper-solver", SLIMMING)
USUAL_ROWS = "cifar10-*"


def table_rows(table: str) -> list[str]:
    """The recipes of a table.

    >>> table_rows("table3")[:3]
    ['cifar10-resnet56-60', 'cifar10-resnet56-60-from-scratch', 'cifar10-resnet56-60-shufflenet']
    """
    tables_1_and_2 = [name for name, row in PAPER_ROWS.items() if row.table in (1, 2)]
    if table == "table5":
        return [name for name in tables_1_and_2 if read_recipe(name).kind == "strucspars"]
    if table == "table3":
        return [row for name in ABLATED for row in (name, *_ablations(name))]
    if table == "variants":
        return [row for name in VARIED for row in (name, *_variants(name))]
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


def base_row(name: str) -> str | None:
    """The row that a row varies; None if it stands for itself.

    >>> base_row("cifar10-resnet20-40-slimming"), base_row("cifar10-resnet20-40")
    ('cifar10-resnet20-40', None)
    """
    return next((base for base in (*ABLATED, *VARIED) if name in (*_ablations(base), *_variants(base))), None)


def first_stage_source(name: str) -> str | None:
    """The row whose first stage a row takes over; None if it has its own, or none.

    >>> first_stage_source("cifar10-resnet56-60-random"), first_stage_source("cifar10-resnet56-60-slimming")
    ('cifar10-resnet56-60', None)
    """
    base = base_row(name)
    return None if base is None or name.endswith(FROM_THE_START) else base


def teacher_row(name: str) -> str | None:
    """The dense network that a row is distilled from; None if it is not.

    >>> teacher_row("cifar10-resnet20-40-distilled"), teacher_row("cifar10-resnet20-40")
    ('cifar10-resnet20-dense', None)
    """
    return dense_row(name) if name.endswith(f"-{DISTILLED}") else None


def dense_row(name: str) -> str:
    """The row of the same network as it is.

    >>> dense_row("cifar10-resnet20-40")
    'cifar10-resnet20-dense'
    """
    data, network, *_ = name.split("-")
    return f"{data}-{network}-dense"


def paper_row(name: str) -> str:
    """The row of the paper that a row is held against: the same method at the same size, however it was trained.

    >>> paper_row("cifar10-resnet20-40-distilled"), paper_row("cifar10-resnet56-60-random")
    ('cifar10-resnet20-40', 'cifar10-resnet56-60-random')
    """
    return next((base for base in VARIED if name in _variants(base) and not name.endswith(SLIMMING)), name)


def _ablations(name: str) -> list[str]:
    ablations = [ablation for ablation in get_args(Ablation) if ablation != "finetune"]
    return [f"{name}-{ablation}" for ablation in ablations] if name in ABLATED else []


def _variants(name: str) -> list[str]:
    return [f"{name}-{way}" for way in VARIED.get(name, ())]
