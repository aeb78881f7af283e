"""Means of few runs, and whether they differ by more than chance."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

# A difference is noise if chance alone makes one as large in one of twenty comparisons.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """A number over several runs, ours or the paper's.

    Attributes:
        mean: of them.
        deviation: of the sample; None where it is not known.
        runs: how many.
    """

    mean: float
    deviation: float | None = None
    runs: int = 1


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and deviation of some runs; None of none.

    >>> spread([93.0, 94.0, 95.0])
    Spread(mean=94.0, deviation=1.0, runs=3)
    """
    if not values:
        return None
    return Spread(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Noise:
    """How far single runs of one row scatter.

    Two or three runs know their own deviation badly, so it is that of all rows together.

    Attributes:
        deviation: of single runs.
        degrees: of freedom: runs that were there to learn it from, less one for every row.
    """

    deviation: float
    degrees: int

    def verdict(self, ours: Spread, paper: Spread) -> str:
        """Whether our mean is above or below the paper's, or no further from it than noise.

        Args:
            ours: of some runs.
            paper: of ten runs with their deviation; without one, of a single run as uncertain as ours.

        >>> noise = Noise(deviation=0.2, degrees=6)
        >>> paper = Spread(91.4, 0.04, runs=10)
        >>> noise.verdict(Spread(91.2, runs=3), paper), noise.verdict(Spread(91.1, runs=3), paper)
        ('noise', 'below')
        """
        deviation, degrees = (
            (self.deviation, self.degrees) if paper.deviation is None else (paper.deviation, paper.runs - 1)
        )
        mine, papers = self.deviation**2 / ours.runs, deviation**2 / paper.runs
        # Welch and Satterthwaite: both deviations are known from a few runs only.
        doubt = mine**2 / self.degrees + papers**2 / degrees
        together = (mine + papers) ** 2 / doubt if doubt > 0 else self.degrees
        difference = ours.mean - paper.mean
        if abs(difference) <= stdtrit(together, (1 + CONFIDENCE) / 2) * math.sqrt(mine + papers):
            return "noise"
        return "above" if difference > 0 else "below"


def noise(rows: Sequence[Sequence[float]]) -> Noise | None:
    """The noise of single runs, from all rows that have several; None if none has.

    >>> noise([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0], [9.0]])
    Noise(deviation=1.0, degrees=4)
    """
    several = [row for row in rows if len(row) > 1]
    if not several:
        return None
    degrees = sum(len(row) - 1 for row in several)
    squares = sum((value - statistics.mean(row)) ** 2 for row in several for value in row)
    return Noise(math.sqrt(squares / degrees), degrees)
