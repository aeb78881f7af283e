"""The paper's numbers, by recipe: Tables 1, 2 and 5, and the accuracies of Table 3."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A row of a table of the paper.

    Attributes:
        table: its number.
        params: parameters of the whole network.
        flops: as the paper counts them; `NetworkCount.paper_flops` counts alike.
        accuracy: top-1, in percent.
        accuracy_deviation: over ten runs, in points; None where there was one.
        top5_accuracy: in percent; None where the paper has none.
    """

    table: int
    params: float
    flops: float
    accuracy: float | None = None
    accuracy_deviation: float | None = None
    top5_accuracy: float | None = None


def _table1(params_e5: float, flops_e7: float, accuracy: float, deviation: float) -> PaperRow:
    # Through text: 1.36 * 1e5 has a tail of binary digits, 1.36e5 has none.
    params, flops = float(f"{params_e5}e5"), float(f"{flops_e7}e7")
    return PaperRow(table=1, params=params, flops=flops, accuracy=accuracy, accuracy_deviation=deviation)


def _table2(params_e6: float, flops_e9: float, accuracy: float) -> PaperRow:
    return PaperRow(table=2, params=float(f"{params_e6}e6"), flops=float(f"{flops_e9}e9"), accuracy=accuracy)


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
    "imagenet-resnet50-35": _table2(17.2, 3.12, 76.82),
    "imagenet-resnet50-65": replace(_table2(10.3, 1.67, 75.10), top5_accuracy=92.52),
    "imagenet-resnet50-85": _table2(5.6, 0.90, 72.47),
    "imagenet-resnet101-dense": _table2(44.5, 7.87, 78.64),
    "imagenet-resnet101-40": _table2(26.7, 5.05, 78.16),
    "imagenet-resnet101-65": replace(_table2(16.5, 2.98, 77.62), top5_accuracy=93.72),
    "imagenet-resnet101-80": _table2(10.6, 1.70, 75.73),
    "imagenet-densenet201-dense": _table2(20.0, 4.39, 77.88),
    "imagenet-densenet201-38": _table2(13.1, 3.53, 77.43),
    "imagenet-densenet201-60": _table2(9.2, 2.10, 75.86),
}


def _table3(finetuned: str, ablation: str, accuracy: float, top5_accuracy: float) -> dict[str, PaperRow]:
    """A row of the ablation: the same groups as the finetuned network, so the same size."""
    row = replace(_TABLE_2[finetuned], table=3, accuracy=accuracy, top5_accuracy=top5_accuracy)
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

PAPER_ROWS: Mapping[str, PaperRow] = MappingProxyType({**_TABLE_1, **_TABLE_2, **_TABLE_3})


@dataclass(frozen=True, kw_only=True)
class PaperTimeline:
    """A column of Table 5: a network on its way through the stages.

    Attributes:
        before_compression, after_compression, finetuned: top-1 accuracies, in percent.
        min_kept_norm: the searched threshold. Differs from the paper: the table has the dropped share of the norm.
    """

    before_compression: float
    after_compression: float
    finetuned: float
    min_kept_norm: float


def _table5(before: float, after: float, finetuned: float, dropped_norm: float) -> PaperTimeline:
    return PaperTimeline(
        before_compression=before,
        after_compression=after,
        finetuned=finetuned,
        min_kept_norm=round(1 - dropped_norm, 3),
    )


PAPER_TIMELINES: Mapping[str, PaperTimeline] = MappingProxyType(
    {
        "imagenet-resnet50-35": _table5(69.07, 60.92, 76.82, 0.127),
        "imagenet-resnet50-65": _table5(66.36, 42.78, 75.10, 0.115),
        "imagenet-resnet50-85": _table5(64.30, 8.82, 72.47, 0.125),
        "imagenet-resnet101-40": _table5(69.56, 65.78, 78.16, 0.095),
        "imagenet-resnet101-65": _table5(67.13, 58.63, 77.62, 0.090),
        "imagenet-resnet101-80": _table5(64.20, 18.57, 75.73, 0.103),
        "imagenet-densenet201-38": _table5(69.10, 66.15, 77.43, 0.098),
        "imagenet-densenet201-60": _table5(66.26, 17.35, 75.86, 0.115),
    }
)
