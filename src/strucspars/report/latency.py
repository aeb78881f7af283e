"""What a run's `bench.json` says about its speed, in one number."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strucspars.bench.results import BenchRow
from strucspars.core.checks import is_number
from strucspars.report.run_reading import RunData


@dataclass(frozen=True, kw_only=True)
class Latency:
    """The fastest way to run a network, at the smallest batch and the fewest threads that were timed.

    Attributes:
        ms: milliseconds for the batch, median.
        speedup: over the same runtime's dense network; None for that itself, and where it was not timed.
        runtime: its name.
        batch, threads: of the timing.
        hardware: what it was timed on; times of different hardware do not compare.
    """

    ms: float
    speedup: float | None
    runtime: str
    batch: int
    threads: int
    hardware: Mapping[str, Any]


def latency_of(run: RunData) -> Latency | None:
    """How fast the run's network is; None if that was not measured."""
    if run.bench is None or run.recipe is None:
        return None
    form = "dense" if run.recipe.kind == "dense" else "compressed"
    rows = [row for row in run.bench.rows if row.form == form and _is_timed(row)]
    if not rows:
        return None
    easiest = min((row.batch, row.threads) for row in rows)
    fastest = min((row for row in rows if (row.batch, row.threads) == easiest), key=_ms)
    timing = fastest.timing
    assert timing is not None
    return Latency(
        ms=timing.ms,
        speedup=None if timing.speedup is None or form == "dense" else timing.speedup.median,
        runtime=fastest.runtime,
        batch=fastest.batch,
        threads=fastest.threads,
        hardware=run.bench.hardware,
    )


def _is_timed(row: BenchRow) -> bool:
    # Read from a file: its numbers may be anything.
    return row.timing is not None and is_number(row.timing.ms) and 0 < row.timing.ms < float("inf")


def _ms(row: BenchRow) -> float:
    assert row.timing is not None
    return row.timing.ms
