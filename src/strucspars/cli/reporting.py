"""From run folders to a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strucspars.report.run_reading import RunData, read_run
from strucspars.report.shared_problems import shared_problems
from strucspars.report.writing import WrittenReport, write_report


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A report, and what it is about.

    Attributes:
        runs: as they were read.
        written: where the report lies.
    """

    runs: tuple[RunData, ...]
    written: WrittenReport

    def remarks(self) -> list[str]:
        """What could not be shown, a line each."""
        return shared_problems({str(run.path): run.problems for run in self.runs})


def reported_runs(paths: Sequence[Path], *, out: Path | None = None) -> Reported:
    """Write the report of some runs.

    Args:
        paths: run folders.
        out: folder to write to; None: `report` in the run folder, or here for several.

    Raises:
        ValueError: one is no run folder, or is named twice.
        OSError: the report cannot be written; an earlier one is kept.
    """
    folders = [path.expanduser() for path in paths]
    runs = tuple(read_run(folder) for folder in folders)
    default = folders[0] / "report" if len(folders) == 1 else Path("report")
    return Reported(runs=runs, written=write_report(runs, out or default))


def document(outcome: Reported) -> dict[str, Any]:
    """A report for scripts."""
    written = outcome.written
    return {
        "page": str(written.page),
        "files": [str(file) for file in written.files],
        "runs": [
            {"folder": str(run.path), "page": str(page), "state": run.state, "problems": list(run.problems)}
            for run, page in zip(outcome.runs, written.run_pages, strict=True)
        ],
    }
