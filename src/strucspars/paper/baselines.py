"""Other methods' points of the paper's Table 2, by network: what Fig. 3 compares with."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class PaperBaseline:
    """A row of another method.

    Attributes:
        method: its name, and the pruning ratio where the table has one.
        params: of the whole network; None where the table has none.
        flops: as the paper counts them.
        accuracy: top-1, in percent.
    """

    method: str
    params: float | None
    flops: float
    accuracy: float


def _rows(*rows: tuple[str, float | None, float, float]) -> tuple[PaperBaseline, ...]:
    """From millions of parameters, 1e9 operations and percent."""
    return tuple(
        PaperBaseline(
            method=method,
            params=None if params is None else float(f"{params}e6"),
            flops=float(f"{flops}e9"),
            accuracy=accuracy,
        )
        for method, params, flops, accuracy in rows
    )


PAPER_BASELINES: Mapping[str, tuple[PaperBaseline, ...]] = MappingProxyType(
    {
        "imagenet-resnet50": _rows(
            ("NISP-A", 18.6, 2.97, 72.75),
            ("Slimming-20%", 17.8, 2.81, 75.12),
            ("Taylor-19%", 17.9, 2.66, 75.48),
            ("FPGM-30%", None, 2.39, 75.59),
            ("ThiNet-30%", 16.9, 2.62, 72.04),
            ("NISP-B", 14.3, 2.29, 72.07),
            ("ABCPruner-80%", 11.8, 1.89, 73.86),
            ("Taylor-28%", 14.2, 2.25, 74.50),
            ("DSA-50%", None, 2.07, 74.69),
            ("Hinge-46%", None, 1.93, 74.70),
            ("FPGM-40%", None, 1.93, 74.83),
            ("HRank-36%", 16.2, 2.30, 74.98),
            ("ThiNet-50%", 12.4, 1.83, 71.01),
            ("Taylor-44%", 7.9, 1.34, 71.69),
            ("HRank-46%", 13.8, 1.55, 71.98),
            ("Slimming-50%", 11.1, 1.87, 71.99),
        ),
        "imagenet-resnet101": _rows(
            ("FPGM-30%", None, 4.55, 77.32),
            ("Taylor-25%", 31.2, 4.70, 77.35),
            ("BN-ISTA-v1", 17.3, 3.69, 74.56),
            ("BN-ISTA-v2", 23.6, 4.47, 75.27),
            ("ABCPruner-80%", 17.7, 3.16, 75.82),
            ("Taylor-45%", 20.7, 2.85, 75.95),
            ("Slimming-50%", 20.9, 3.16, 75.97),
            ("SCOP-B", 18.8, 3.13, 77.36),
            ("DMC-56%", None, 3.46, 77.40),
            ("Taylor-60%", 13.6, 1.76, 74.16),
            ("ABCPruner-50%", 12.9, 1.98, 74.76),
        ),
        "imagenet-densenet201": _rows(("Taylor-40%", 12.5, 3.02, 76.51), ("Taylor-64%", 9.0, 2.21, 75.28)),
    }
)
