"""The report: one self-contained page in which all content is escaped, and every figure and table as a file."""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from strucspars._version import __version__
from strucspars.io.files import replace_folder
from strucspars.report.contents import ComparisonContents, RunContents, comparison_contents, run_contents
from strucspars.report.drawing import NamedFigure
from strucspars.report.layers import PRINTED
from strucspars.report.named_table import Cell, NamedTable, Unit
from strucspars.report.reading import RunData
from strucspars.train.recipe_reading import recipe_yaml

PAGE = "index.html"
LAYER_TABLE = "layers"
# Figures above the layers themselves.
BEFORE_LAYERS = ("dynamics", "cardinality")
SHORT_TITLES = {"dynamics": "Training", "cardinality": "Groups", "confusion": "Mixing", "churn": "Churn"}
LONGEST_NAME = 80


@dataclass(frozen=True, kw_only=True)
class WrittenReport:
    """The location of a report: the page to open first, one per run, and all files."""

    page: Path
    run_pages: tuple[Path, ...]
    files: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class RunLink:
    """A run on the overview page: its unique title, and the address of its page relative to the overview."""

    run: RunData
    title: str
    address: str


def write_report(runs: Sequence[RunData], out: str | Path) -> WrittenReport:
    """Write the report of one run, or of several with a page that compares them, in place of an earlier one."""
    out = Path(out)
    if not runs:
        raise ValueError("a report needs at least one run folder")
    for path, count in Counter(run.path.resolve() for run in runs).items():
        if count > 1:
            raise ValueError(f"{path} is given twice; name every run once")
    with replace_folder(out) as folder:
        pages = _write_runs(runs, folder) if len(runs) > 1 else [_write_run(runs[0], folder, overview=None)]
        written = sorted(file for file in folder.rglob("*") if file.is_file())
    run_pages, files = (tuple(out / path.relative_to(folder) for path in paths) for paths in (pages, written))
    return WrittenReport(page=out / PAGE, run_pages=run_pages, files=files)


def _write_runs(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """The overview, and a folder for every run."""
    counts = Counter(run.name for run in runs)
    pages, links = [], []
    for run, name in zip(runs, file_names(run.name for run in runs), strict=True):
        pages.append(_write_run(run, folder / "runs" / name, overview=f"../../{PAGE}"))
        # Runs of one name are told apart by their paths.
        title = run.name if counts[run.name] == 1 else str(run.path)
        links.append(RunLink(run=run, title=title, address=f"runs/{name}/{PAGE}"))
    contents = comparison_contents(runs)
    _write_text(folder / PAGE, overview_page(contents, links))
    _write_files(folder, contents.figures, (runs_table(links), *contents.tables))
    return pages


def _write_run(run: RunData, folder: Path, *, overview: str | None) -> Path:
    contents, page = run_contents(run), folder / PAGE
    _write_files(folder, contents.figures, contents.tables)
    _write_text(page, run_page(contents, overview=overview))
    return page


def _write_files(folder: Path, figures: Sequence[NamedFigure], tables: Sequence[NamedTable]) -> None:
    for figure in figures:
        _write_text(folder / "figures" / f"{figure.name}.svg", figure.svg())
        (folder / "figures" / f"{figure.name}.png").write_bytes(figure.png())
    for table in (*tables, *(table for figure in figures for table in figure.tables)):
        _write_text(folder / "tables" / f"{table.name}.csv", table.csv())
        _write_text(folder / "tables" / f"{table.name}.tex", table.latex())


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names of folders may not be valid UTF-8. Bytes, because CSV has line ends of its own on every system.
    path.write_bytes(text.encode("utf-8", errors="replace"))


def file_names(names: Iterable[str]) -> list[str]:
    """Names that every file system takes, all of them different."""
    taken: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:LONGEST_NAME] or "run"
        unique, count = plain, 1
        # Some file systems do not tell capitals from small letters.
        while unique.lower() in (other.lower() for other in taken):
            count += 1
            unique = f"{plain}-{count}"
        taken.append(unique)
    return taken


def run_page(contents: RunContents, *, overview: str | None = None) -> str:
    """The page of one run; `overview` is the address of the page that compares it with others."""
    run, recipe, layers = contents.run, contents.run.recipe, contents.layers
    before = [figure for figure in contents.figures if figure.name in BEFORE_LAYERS]
    after = [figure for figure in contents.figures if not figure.name.startswith((PRINTED, *BEFORE_LAYERS))]
    layer_tables = [table for table in contents.tables if table.name == LAYER_TABLE]
    subtitle = f"{recipe.model.name} on {recipe.data.name}, recipe {recipe.name}, seed {recipe.seed} · {run.state}"
    return _rendered(
        "run.html.j2",
        title=run.name,
        subtitle=subtitle if run.one_shot is None else f"{recipe.model.name} · {run.state}",
        sections=[
            ("summary", "Summary"),
            *_figure_sections(before),
            *([("layer-view", "Layers")] if layers else []),
            *_figure_sections(after),
            *((f"table-{table.name}", "Layer table") for table in layer_tables),
            ("repeat", "Repeat"),
        ],
        contents=contents,
        overview=overview,
        summary_tables=[table for table in contents.tables if table.name != LAYER_TABLE],
        layer_tables=layer_tables,
        figures_before=before,
        figures_after=after,
        layers=layers,
        # The layer with the most groups is shown first.
        chosen=max(layers, key=lambda layer: layer.num_groups).id if layers else "",
        layer_links={layer.name: f"#{layer.id}" for layer in layers},
        # The stages in the recipe of a one-shot compression did not run.
        recipe_text="" if run.one_shot is not None else recipe_yaml(recipe),
        decisions=_yaml(run.decisions),
        environment=_yaml(run.environment),
    )


def overview_page(contents: ComparisonContents, links: Sequence[RunLink]) -> str:
    """The page that compares several runs and leads to theirs."""
    finished = sum(link.run.is_finished for link in links)
    return _rendered(
        "overview.html.j2",
        title=f"{len(links)} runs compared",
        subtitle="all of them finished" if finished == len(links) else f"{finished} of them finished",
        sections=[
            ("runs", "Runs"),
            *_figure_sections(contents.figures),
            *((f"table-{table.name}", table.title) for table in contents.tables),
        ],
        contents=contents,
        runs_table=runs_table(links),
        run_links={link.title: link.address for link in links},
    )


def runs_table(links: Sequence[RunLink]) -> NamedTable:
    """What was compared, run by run."""
    rows: list[tuple[Cell, ...]] = []
    for link in links:
        run, recipe, outcome = link.run, link.run.recipe, link.run.summary or link.run.plan
        # One-shot compression reads no images and draws nothing at random.
        data, seed = (recipe.data.name, recipe.seed) if run.one_shot is None else (None, None)
        removed = None if outcome is None else outcome.removed_param_fraction
        top1 = None if run.summary is None else run.summary.finetuned.last_top1
        rows.append((link.title, recipe.model.name, data, seed, removed, top1, run.state))
    columns: dict[str, Unit] = {"run": "text", "network": "text", "data": "text", "seed": "count"}
    columns |= {"removed parameters": "percent", "top-1": "percent", "state": "text"}
    return NamedTable(name="runs", title="Runs", columns=columns, rows=tuple(rows))


def _figure_sections(figures: Iterable[NamedFigure]) -> Iterator[tuple[str, str]]:
    """The entries of the navigation: id of the element, a word or two."""
    for figure in figures:
        yield f"figure-{figure.name}", SHORT_TITLES.get(figure.name, figure.title)


def _yaml(values: Mapping[str, Any]) -> str:
    known = {key: value for key, value in values.items() if value is not None}
    return yaml.safe_dump(known, sort_keys=False, allow_unicode=True) if known else ""


def _rendered(template: str, **values: Any) -> str:
    own = {"style": _own_text("style.css"), "script": _own_text("script.js"), "policy": _policy()}
    return _templates().get_template(template).render({**values, **own, "version": __version__})


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("strucspars", "report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["zip"] = zip
    return environment


@cache
def _own_text(name: str) -> str:
    return (files("strucspars") / "report" / name).read_text(encoding="utf-8")


def _policy() -> str:
    """Allow our own script and style by their hashes, and load nothing: other code in the page cannot run."""
    script, style = (
        base64.b64encode(hashlib.sha256(_own_text(name).encode()).digest()).decode()
        for name in ("script.js", "style.css")
    )
    return (
        f"default-src 'none'; img-src data:; script-src 'sha256-{script}'; style-src-elem 'sha256-{style}'; "
        "style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )
