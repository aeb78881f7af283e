"""Reports on disk: the page, and every figure and table as files beside it."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strucspars.io.folders import replace_folder
from strucspars.report.contents import comparison_contents, run_contents
from strucspars.report.drawing import NamedFigure
from strucspars.report.named_table import NamedTable
from strucspars.report.page import RunLink, overview_page, run_page, runs_table
from strucspars.report.reading import RunData

PAGE = "index.html"
_LONGEST_NAME = 80


@dataclass(frozen=True, kw_only=True)
class WrittenReport:
    """The location of a report.

    Attributes:
        page: to open first.
        run_pages: one per run, in their order; of a single run, it is the page.
        files: all that was written, figures and tables too.
    """

    page: Path
    run_pages: tuple[Path, ...]
    files: tuple[Path, ...]


def write_report(runs: Sequence[RunData], out: str | Path) -> WrittenReport:
    """Write the report of one run, or of several: then a page that compares them, and one for each.

    An earlier report in the folder `out` is replaced, whole or not at all.

    Raises:
        ValueError: no run, or one twice.
        OSError: the folder holds something else, or cannot be written; what was there is kept.
    """
    out = Path(out)
    _check_runs(runs)
    with replace_folder(out) as folder:
        pages = _write_runs(runs, folder) if len(runs) > 1 else [_write_run(runs[0], folder, overview=None)]
        files = sorted(file for file in folder.rglob("*") if file.is_file())
    return WrittenReport(
        page=out / PAGE,
        run_pages=tuple(out / page.relative_to(folder) for page in pages),
        files=tuple(out / file.relative_to(folder) for file in files),
    )


def file_names(names: Iterable[str]) -> list[str]:
    """Names that every file system takes, all of them different.

    >>> file_names(["resnet 20/a", "resnet 20/b", "resnet 20/a", ".."])
    ['resnet-20-a', 'resnet-20-b', 'resnet-20-a-2', 'run']
    """
    taken: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:_LONGEST_NAME] or "run"
        unique, count = plain, 1
        # Some file systems do not tell capitals from small letters.
        while unique.lower() in (other.lower() for other in taken):
            count += 1
            unique = f"{plain}-{count}"
        taken.append(unique)
    return taken


def _check_runs(runs: Sequence[RunData]) -> None:
    if not runs:
        raise ValueError("a report needs at least one run folder")
    counts = Counter(run.path.resolve() for run in runs)
    for run in runs:
        if counts[run.path.resolve()] > 1:
            raise ValueError(f"{run.path} is given twice; name every run once")


def _write_runs(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """The overview, and a folder for every run."""
    names = file_names(run.name for run in runs)
    pages = [
        _write_run(run, folder / "runs" / name, overview=f"../../{PAGE}") for run, name in zip(runs, names, strict=True)
    ]
    contents = comparison_contents(runs)
    counts = Counter(run.name for run in runs)
    # Runs of one name are told apart by their paths.
    titles = [run.name if counts[run.name] == 1 else str(run.path) for run in runs]
    links = [
        RunLink(run=run, title=title, address=f"runs/{name}/{PAGE}")
        for run, title, name in zip(runs, titles, names, strict=True)
    ]
    _write_text(folder / PAGE, overview_page(contents, links))
    _write_files(folder, contents.figures, (runs_table(links), *contents.tables))
    return pages


def _write_run(run: RunData, folder: Path, *, overview: str | None) -> Path:
    contents = run_contents(run)
    _write_files(folder, contents.figures, contents.tables)
    _write_text(folder / PAGE, run_page(contents, overview=overview))
    return folder / PAGE


def _write_files(folder: Path, figures: Sequence[NamedFigure], tables: Sequence[NamedTable]) -> None:
    for figure in figures:
        _write_text(folder / "figures" / f"{figure.name}.svg", figure.svg())
        (folder / "figures" / f"{figure.name}.png").write_bytes(figure.png())
    for table in tables:
        _write_text(folder / "tables" / f"{table.name}.csv", table.csv())
        _write_text(folder / "tables" / f"{table.name}.tex", table.latex())


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names of folders may not be valid UTF-8. Bytes, because CSV has line ends of its own on every system.
    path.write_bytes(text.encode("utf-8", errors="replace"))
