"""The published numbers: Tables 1 to 5, and which recipes repeat them."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import get_args

from strucspars.bench.results import PublishedTime, PublishedTimes
from strucspars.paper.noise import Sample
from strucspars.train.recipe import Ablation

PAPER_RUNS = 10


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A row of a table of the paper, accuracies as fractions; None where the paper has no number.

    Attributes:
        table: its number.
        params: parameters of the whole network.
        flops: as the paper counts them; `NetworkCount.paper_flops` counts alike.
        top1: finetuned, over ten runs where it has a deviation.
        top5: finetuned.
        before_compression, after_compression: top-1 of Table 5.
        min_kept_norm: the searched threshold of Table 5. Differs from the paper: the table has the dropped share.
    """

    table: int
    params: float
    flops: float
    top1: Sample
    top5: float | None = None
    before_compression: float | None = None
    after_compression: float | None = None
    min_kept_norm: float | None = None


def _single(percentage: float) -> Sample:
    return Sample(mean=percentage / 100, deviation=None, count=1)


def _table1(params_e5: float, flops_e7: float, accuracy: float, deviation: float) -> PaperRow:
    # Through text: 1.36 * 1e5 has a tail of binary digits, 1.36e5 has none.
    params, flops = float(f"{params_e5}e5"), float(f"{flops_e7}e7")
    top1 = Sample(mean=accuracy / 100, deviation=deviation / 100, count=PAPER_RUNS)
    return PaperRow(table=1, params=params, flops=flops, top1=top1)


def _table2(
    params_e6: float,
    flops_e9: float,
    accuracy: float,
    *,
    top5: float | None = None,
    table5: tuple[float, float, float] | None = None,
) -> PaperRow:
    """With the network's columns of Table 5: accuracy before and after compression, dropped norm."""
    params, flops = float(f"{params_e6}e6"), float(f"{flops_e9}e9")
    row = PaperRow(
        table=2, params=params, flops=flops, top1=_single(accuracy), top5=None if top5 is None else top5 / 100
    )
    if table5 is None:
        return row
    before, after, dropped_norm = table5
    kept_norm = round(1 - dropped_norm, 3)
    return replace(row, before_compression=before / 100, after_compression=after / 100, min_kept_norm=kept_norm)


_TABLE_1 = {
    "cifar10-resnet20-dense": _table1(2.20, 3.53, 91.70, 0.12),
    "cifar10-resnet20-slimming40": _table1(1.91, 3.10, 91.74, 0.35),
    "cifar10-resnet20-20": _table1(1.76, 3.18, 91.79, 0.23),
    "cifar10-resnet20-slimming60": _table1(1.36, 2.24, 89.68, 0.38),
    "cifar10-resnet20-40": _table1(1.31, 2.58, 91.42, 0.04),
    "cifar10-resnet56-dense": _table1(5.90, 9.16, 93.50, 0.19),
    "cifar10-resnet56-slimming60": _table1(4.15, 5.75, 93.10, 0.25),
    "cifar10-resnet56-30": _table1(4.08, 7.17, 94.19, 0.16),
    "cifar10-resnet56-50": _table1(2.96, 4.81, 93.70, 0.06),
    "cifar10-resnet56-slimming80": _table1(2.33, 3.50, 91.01, 0.02),
    "cifar10-resnet56-60": _table1(2.34, 4.20, 93.48, 0.13),
    "cifar10-resnet56-70": _table1(1.80, 3.52, 93.25, 0.02),
    "cifar10-resnet110-dense": _table1(11.47, 17.59, 94.62, 0.22),
    "cifar10-resnet110-slimming40": _table1(9.24, 12.55, 94.49, 0.12),
    "cifar10-resnet110-20": _table1(9.12, 14.76, 94.78, 0.11),
    "cifar10-resnet110-40": _table1(6.69, 11.60, 94.55, 0.18),
    "cifar10-resnet110-slimming60": _table1(8.15, 10.66, 94.29, 0.11),
    "cifar10-resnet110-30": _table1(7.89, 12.47, 94.69, 0.08),
    "cifar10-resnet110-60": _table1(5.41, 10.66, 94.42, 0.04),
}

_TABLE_2 = {
    "imagenet-resnet50-dense": _table2(25.6, 4.14, 77.10),
    "imagenet-resnet50-35": _table2(17.2, 3.12, 76.82, table5=(69.07, 60.92, 0.127)),
    "imagenet-resnet50-65": _table2(10.3, 1.67, 75.10, top5=92.52, table5=(66.36, 42.78, 0.115)),
    "imagenet-resnet50-85": _table2(5.6, 0.90, 72.47, table5=(64.30, 8.82, 0.125)),
    "imagenet-resnet101-dense": _table2(44.5, 7.87, 78.64),
    "imagenet-resnet101-40": _table2(26.7, 5.05, 78.16, table5=(69.56, 65.78, 0.095)),
    "imagenet-resnet101-65": _table2(16.5, 2.98, 77.62, top5=93.72, table5=(67.13, 58.63, 0.090)),
    "imagenet-resnet101-80": _table2(10.6, 1.70, 75.73, table5=(64.20, 18.57, 0.103)),
    "imagenet-densenet201-dense": _table2(20.0, 4.39, 77.88),
    "imagenet-densenet201-38": _table2(13.1, 3.53, 77.43, table5=(69.10, 66.15, 0.098)),
    "imagenet-densenet201-60": _table2(9.2, 2.10, 75.86, table5=(66.26, 17.35, 0.115)),
}


def _table3(finetuned: str, ablation: str, accuracy: float, top5: float) -> dict[str, PaperRow]:
    """The same groups, and so the same size, as the finetuned network."""
    size = _TABLE_2[finetuned]
    row = PaperRow(table=3, params=size.params, flops=size.flops, top1=_single(accuracy), top5=top5 / 100)
    return {f"{finetuned}-{ablation}": row}


_TABLE_3 = {
    **_table3("imagenet-resnet50-65", "from-scratch", 75.02, 92.46),
    **_table3("imagenet-resnet50-65", "shufflenet", 74.97, 92.41),
    **_table3("imagenet-resnet50-65", "random", 69.45, 89.45),
    **_table3("imagenet-resnet50-65", "no-shuffle", 73.30, 91.39),
    **_table3("imagenet-resnet101-65", "from-scratch", 77.14, 93.53),
    **_table3("imagenet-resnet101-65", "shufflenet", 76.91, 93.38),
    **_table3("imagenet-resnet101-65", "random", 73.16, 91.44),
    **_table3("imagenet-resnet101-65", "no-shuffle", 75.31, 92.64),
}

PAPER_ROWS: Mapping[str, PaperRow] = {**_TABLE_1, **_TABLE_2, **_TABLE_3}

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


@dataclass(frozen=True)
class PaperBaseline:
    """Another method in Table 2, which Fig. 3 compares with: millions of parameters, 1e9 operations, percent."""

    method: str
    params_e6: float | None
    flops_e9: float
    accuracy: float


PAPER_BASELINES: Mapping[str, tuple[PaperBaseline, ...]] = {
    "imagenet-resnet50": (
        PaperBaseline("NISP-A", 18.6, 2.97, 72.75),
        PaperBaseline("Slimming-20%", 17.8, 2.81, 75.12),
        PaperBaseline("Taylor-19%", 17.9, 2.66, 75.48),
        PaperBaseline("FPGM-30%", None, 2.39, 75.59),
        PaperBaseline("ThiNet-30%", 16.9, 2.62, 72.04),
        PaperBaseline("NISP-B", 14.3, 2.29, 72.07),
        PaperBaseline("ABCPruner-80%", 11.8, 1.89, 73.86),
        PaperBaseline("Taylor-28%", 14.2, 2.25, 74.50),
        PaperBaseline("DSA-50%", None, 2.07, 74.69),
        PaperBaseline("Hinge-46%", None, 1.93, 74.70),
        PaperBaseline("FPGM-40%", None, 1.93, 74.83),
        PaperBaseline("HRank-36%", 16.2, 2.30, 74.98),
        PaperBaseline("ThiNet-50%", 12.4, 1.83, 71.01),
        PaperBaseline("Taylor-44%", 7.9, 1.34, 71.69),
        PaperBaseline("HRank-46%", 13.8, 1.55, 71.98),
        PaperBaseline("Slimming-50%", 11.1, 1.87, 71.99),
    ),
    "imagenet-resnet101": (
        PaperBaseline("FPGM-30%", None, 4.55, 77.32),
        PaperBaseline("Taylor-25%", 31.2, 4.70, 77.35),
        PaperBaseline("BN-ISTA-v1", 17.3, 3.69, 74.56),
        PaperBaseline("BN-ISTA-v2", 23.6, 4.47, 75.27),
        PaperBaseline("ABCPruner-80%", 17.7, 3.16, 75.82),
        PaperBaseline("Taylor-45%", 20.7, 2.85, 75.95),
        PaperBaseline("Slimming-50%", 20.9, 3.16, 75.97),
        PaperBaseline("SCOP-B", 18.8, 3.13, 77.36),
        PaperBaseline("DMC-56%", None, 3.46, 77.40),
        PaperBaseline("Taylor-60%", 13.6, 1.76, 74.16),
        PaperBaseline("ABCPruner-50%", 12.9, 1.98, 74.76),
    ),
    "imagenet-densenet201": (
        PaperBaseline("Taylor-40%", 12.5, 3.02, 76.51),
        PaperBaseline("Taylor-64%", 9.0, 2.21, 75.28),
    ),
}

# Networks whose channel orders Table 3 replaces. The paper has those on ImageNet; the one on CIFAR-10 is our addition.
ABLATED = ("cifar10-resnet56-60", "imagenet-resnet50-65", "imagenet-resnet101-65")
ABLATIONS = tuple(ablation for ablation in get_args(Ablation) if ablation != "finetune")
# Endings of recipes that compress a row to the same size in another way, and of those by another method.
TRAINED_OTHERWISE = ("low-rate", "distilled", "modern", "paper-solver")
OTHER_METHOD = "slimming"
USUAL_ROWS = "cifar10-*"


def table_rows(table: str) -> list[str]:
    """The recipes of a table of the paper.

    >>> table_rows("table3")[:3]
    ['cifar10-resnet56-60', 'cifar10-resnet56-60-from-scratch', 'cifar10-resnet56-60-shufflenet']
    """
    if table == "table3":
        return [row for name in ABLATED for row in (name, *(f"{name}-{ablation}" for ablation in ABLATIONS))]
    if table == "table5":
        return [name for name in (*_TABLE_1, *_TABLE_2) if "slimming" not in name and not name.endswith("dense")]
    return list({"table1": _TABLE_1, "table2": _TABLE_2}[table])


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
    """The row that a recipe varies; None if it stands for itself.

    >>> base_row("cifar10-resnet56-60-random"), base_row("cifar10-resnet56-60")
    ('cifar10-resnet56-60', None)
    """
    endings = (*ABLATIONS, *TRAINED_OTHERWISE, OTHER_METHOD)
    return next((name.removesuffix(f"-{ending}") for ending in endings if name.endswith(f"-{ending}")), None)


def published_row(name: str) -> PaperRow | None:
    """The paper's row for a recipe: the same method at the same size, however it was trained; None if there is none."""
    base = base_row(name)
    return PAPER_ROWS.get(base) if base and name.endswith(TRAINED_OTHERWISE) else PAPER_ROWS.get(name)
