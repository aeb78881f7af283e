"""The paper's Table 4: ResNet-50 on one core of an Intel E5-2603 v4 at 1.70 GHz, images of 224 x 224."""

from dataclasses import dataclass

PAPER_NETWORK = "resnet50"
PAPER_IMAGE_SHAPE = (3, 224, 224)
PAPER_HARDWARE = "one core of an Intel E5-2603 v4"


@dataclass(frozen=True, kw_only=True)
class PaperTime:
    """A row of Table 4.

    Attributes:
        rate: None for the dense network.
        gflops: as the paper counts them.
        ms: average run time.
        frames_per_second: as printed.
    """

    rate: float | None
    gflops: float
    ms: float
    frames_per_second: float

    @property
    def speedup(self) -> float:
        """Against the paper's dense network."""
        return PAPER_TIMES[0].ms / self.ms

    @property
    def operation_ratio(self) -> float:
        """How many times fewer operations than the paper's dense network."""
        return PAPER_TIMES[0].gflops / self.gflops


PAPER_TIMES = (
    PaperTime(rate=None, gflops=4.14, ms=80.2, frames_per_second=12.4),
    PaperTime(rate=0.35, gflops=3.12, ms=68.2, frames_per_second=14.7),
    PaperTime(rate=0.65, gflops=1.67, ms=61.3, frames_per_second=16.3),
    PaperTime(rate=0.85, gflops=0.90, ms=53.5, frames_per_second=18.7),
)
