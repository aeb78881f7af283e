"""The published numbers: Tables 1 to 5, and which recipes repeat them."""

import csv
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import get_args

from strucspars.bench.results import PublishedTime, PublishedTimes
from strucspars.paper.noise import Sample
from strucspars.train.recipe import Ablation

PAPER_RUNS = 10


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A row of a table of the paper, accuracies as fractions; None where the paper has no number.

    Differs from the paper: `min_kept_norm` is the searched threshold of Table 5, which has the dropped share.
    """

    table: int
    params: float
    flops: float
    top1: Sample
    top5: float | None = None
    before_compression: float | None = None
    after_compression: float | None = None
    min_kept_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class OtherMethod:
    """Another method in Table 2, which Fig. 3 compares with; accuracy as a fraction."""

    network: str
    method: str
    params: float | None
    flops: float
    top1: float


def _read(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((files("strucspars.paper") / name).read_text(encoding="utf-8").splitlines()))


def _fraction(percentage: str) -> float | None:
    return float(percentage) / 100 if percentage else None


def _paper_row(cells: Mapping[str, str]) -> PaperRow:
    deviation, dropped_norm = _fraction(cells["deviation"]), cells["dropped_norm"]
    runs = 1 if deviation is None else PAPER_RUNS
    return PaperRow(
        table=int(cells["table"]),
        params=float(cells["params"]),
        flops=float(cells["flops"]),
        top1=Sample(mean=float(cells["top1"]) / 100, deviation=deviation, count=runs),
        top5=_fraction(cells["top5"]),
        before_compression=_fraction(cells["before_compression"]),
        after_compression=_fraction(cells["after_compression"]),
        min_kept_norm=round(1 - float(dropped_norm), 3) if dropped_norm else None,
    )


# By recipe. The files hold what the paper prints: accuracies in percent, and the share of the norm that is dropped.
# Networks of Table 3 have the groups of the finetuned one, and so its size.
PAPER_ROWS = {cells["recipe"]: _paper_row(cells) for cells in _read("published.csv")}
OTHER_METHODS = tuple(
    OtherMethod(
        network=cells["network"],
        method=cells["method"],
        params=float(cells["params"]) if cells["params"] else None,
        flops=float(cells["flops"]),
        top1=float(cells["top1"]) / 100,
    )
    for cells in _read("other_methods.csv")
)

PAPER_TIMES = PublishedTimes(
    source="the paper",
    conditions="Table 4, one core of an Intel E5-2603 v4",
    network="resnet50",
    image_shape=(3, 224, 224),
    rows=(
        PublishedTime(None, 4.14, 80.2, 12.4),
        PublishedTime(0.35, 3.12, 68.2, 14.7),
        PublishedTime(0.65, 1.67, 61.3, 16.3),
        PublishedTime(0.85, 0.90, 53.5, 18.7),
    ),
)


# Networks whose channel orders Table 3 replaces. The paper has those on ImageNet; the one on CIFAR-10 is our addition.
ABLATED = ("cifar10-resnet56-60", "imagenet-resnet50-65", "imagenet-resnet101-65")
ABLATIONS = tuple(ablation for ablation in get_args(Ablation) if ablation != "finetune")
# Endings of recipes that compress a row to the same size in another way, and of those by another method.
TRAINED_OTHERWISE = ("low-rate", "distilled", "modern", "paper-solver", "progressive")
OTHER_METHOD = "slimming"
USUAL_ROWS = "cifar10-*"


def table_rows(table: str) -> list[str]:
    """The recipes of a table of the paper."""
    if table == "table3":
        return [row for name in ABLATED for row in (name, *(f"{name}-{ablation}" for ablation in ABLATIONS))]
    if table == "table5":
        rows = (*table_rows("table1"), *table_rows("table2"))
        return [name for name in rows if "slimming" not in name and not name.endswith("dense")]
    return [name for name, row in PAPER_ROWS.items() if f"table{row.table}" == table]


def selected_rows(table: str, patterns: Sequence[str] | None) -> list[str]:
    """The rows of a table whose name fits a pattern; by default those on CIFAR-10 if there are any, else all."""
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
    """The row that a recipe varies, such as `cifar10-resnet56-60` of `cifar10-resnet56-60-random`; None for others."""
    endings = (*ABLATIONS, *TRAINED_OTHERWISE, OTHER_METHOD)
    return next((name.removesuffix(f"-{ending}") for ending in endings if name.endswith(f"-{ending}")), None)


def published_row(name: str) -> PaperRow | None:
    """The paper's row for a recipe: the same method at the same size, however it was trained; None if there is none."""
    base = base_row(name)
    # Of a variant of a variant, such as a distilled progressive run, the row of its base's base.
    return published_row(base) if base and name.endswith(TRAINED_OTHERWISE) else PAPER_ROWS.get(name)
