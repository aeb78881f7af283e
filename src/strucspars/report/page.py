"""The report as HTML: one file that needs nothing beside it, and trusts nothing that it shows."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from strucspars._version import __version__
from strucspars.report.contents import ComparisonContents, RunContents
from strucspars.report.drawing import NamedFigure
from strucspars.report.layer_view import LayerView, layer_views
from strucspars.report.named_table import Cell, NamedTable, TableColumn
from strucspars.report.one_shot import ONE_SHOT_STATE
from strucspars.report.reading import RunData, shared_problems
from strucspars.report.repeat_command import one_shot_command, repeat_command

LAYER_TABLE = "layers"
ONE_LAYER = "importance-"
# The layers themselves come right after how many groups they have.
BEFORE_LAYERS = ("dynamics", "cardinality")
SHORT_TITLES = {
    "dynamics": "Training",
    "cardinality": "Groups",
    "confusion": "Mixing",
    "churn": "Churn",
    LAYER_TABLE: "Layer table",
}
# What matplotlib puts there says how lines end; the page's own style says the same.
_STYLE_SHEET = re.compile(r"<style\b[^>]*>[^<]*</style>")


@dataclass(frozen=True, kw_only=True)
class Section:
    """An entry of the navigation.

    Attributes:
        id: of the element.
        title: a word or two.
    """

    id: str
    title: str


@dataclass(frozen=True, kw_only=True)
class RunLink:
    """A run on the overview page.

    Attributes:
        run: what was read.
        title: its name, different from those of the others.
        address: of its own page, relative to the overview.
    """

    run: RunData
    title: str
    address: str


def run_page(contents: RunContents, *, overview: str | None = None) -> str:
    """The page of one run.

    Args:
        contents: what to show.
        overview: address of the page that compares it with others; None if there is none.
    """
    run = contents.run
    layers = layer_views(contents.layers, contents.levels, is_compressed=run.plan is not None)
    # The page shows every layer; figures of single ones are for print.
    shown = [figure for figure in contents.figures if not figure.name.startswith(ONE_LAYER)]
    before = [figure for figure in shown if figure.name in BEFORE_LAYERS]
    after = [figure for figure in shown if figure.name not in BEFORE_LAYERS]
    layer_tables = [table for table in contents.tables if table.name == LAYER_TABLE]
    figure_tables = {figure.name: _tables_of(figure, contents.tables) for figure in shown}
    beside_figures = {table.name for tables in figure_tables.values() for table in tables}
    return _rendered(
        "run.html.j2",
        title=run.name,
        subtitle=_subtitle(run),
        sections=list(_run_sections(before, layers, after, layer_tables)),
        values={
            "contents": contents,
            "overview": overview,
            "summary_tables": [table for table in contents.tables if table.name not in {LAYER_TABLE, *beside_figures}],
            "figure_tables": figure_tables,
            "layer_tables": layer_tables,
            "figures_before": before,
            "figures_after": after,
            "layers": layers,
            "layer_links": {layer.name: f"#{layer.id}" for layer in layers},
            "command": _command(run),
            # The stages that it names never ran here.
            "recipe_text": "" if run.state == ONE_SHOT_STATE else run.recipe_text,
            "decisions": list(_facts(run.decisions)),
            "environment": list(_facts(run.environment)),
        },
    )


def overview_page(contents: ComparisonContents, links: Sequence[RunLink]) -> str:
    """The page that compares several runs and leads to theirs."""
    finished = sum(link.run.is_finished for link in links)
    return _rendered(
        "overview.html.j2",
        title=f"{len(links)} runs compared",
        subtitle="all of them finished" if finished == len(links) else f"{finished} of them finished",
        sections=[
            Section(id="runs", title="Runs"),
            *_figure_sections(contents.figures),
            *(Section(id=f"table-{table.name}", title=table.title) for table in contents.tables),
        ],
        values={
            "contents": contents,
            "runs_table": runs_table(links),
            "run_links": {link.title: link.address for link in links},
            "problems": shared_problems({link.title: link.run.problems for link in links}),
        },
    )


def runs_table(links: Sequence[RunLink]) -> NamedTable:
    """What was compared, run by run."""
    return NamedTable(
        name="runs",
        title="Runs",
        columns=(
            TableColumn(title="run"),
            TableColumn(title="network"),
            TableColumn(title="data"),
            TableColumn(title="seed", form="count"),
            TableColumn(title="removed parameters", form="percent"),
            TableColumn(title="top-1", form="percent"),
            TableColumn(title="state"),
        ),
        rows=tuple(_run_row(link) for link in links),
    )


def _run_row(link: RunLink) -> tuple[Cell, ...]:
    recipe, summary, one_shot = link.run.recipe, link.run.summary, link.run.one_shot
    removed = summary or one_shot
    # Without training there were neither images nor anything drawn at random.
    trained = None if link.run.state == ONE_SHOT_STATE else recipe
    return (
        link.title,
        None if recipe is None else recipe.model.name,
        None if trained is None else trained.data.name,
        None if trained is None else trained.seed,
        None if removed is None else removed.params.removed_fraction,
        None if summary is None else summary.finetuned.last_top1,
        link.run.state,
    )


def inline_drawing(figure: NamedFigure) -> Markup:
    """The figure as an element of the page, without a style sheet of its own, which would reach the whole page."""
    return Markup(_STYLE_SHEET.sub("", figure.inline_svg()))


def _command(run: RunData) -> str | None:
    """What repeats the run; None where that is not known."""
    if run.recipe is None:
        return None
    if run.state == ONE_SHOT_STATE:
        return None if run.one_shot is None else one_shot_command(run.recipe, run.one_shot)
    return repeat_command(run.recipe, run.path / "recipe.yaml")


def _subtitle(run: RunData) -> str:
    if run.recipe is None:
        return run.state
    recipe = run.recipe
    if run.state == ONE_SHOT_STATE:
        return f"{recipe.model.name} · {run.state}"
    return f"{recipe.model.name} on {recipe.data.name}, recipe {recipe.name}, seed {recipe.seed} · {run.state}"


def _tables_of(figure: NamedFigure, tables: Iterable[NamedTable]) -> list[NamedTable]:
    """Those that say in numbers what the figure shows: `confusion-1` belongs to `confusion`."""
    return [table for table in tables if table.name.startswith(f"{figure.name}-")]


def _run_sections(
    before: Sequence[NamedFigure],
    layers: Sequence[LayerView],
    after: Sequence[NamedFigure],
    layer_tables: Sequence[NamedTable],
) -> Iterator[Section]:
    yield Section(id="summary", title="Summary")
    yield from _figure_sections(before)
    if layers:
        yield Section(id="layer-view", title="Layers")
    yield from _figure_sections(after)
    for table in layer_tables:
        yield Section(id=f"table-{table.name}", title=SHORT_TITLES[table.name])
    yield Section(id="repeat", title="Repeat")


def _figure_sections(figures: Iterable[NamedFigure]) -> Iterator[Section]:
    for figure in figures:
        yield Section(id=f"figure-{figure.name}", title=SHORT_TITLES.get(figure.name, figure.title))


def _facts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Plain values by dotted key, without those that say nothing."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            yield from _facts({str(number): each for number, each in enumerate(value, 1)}, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield f"{prefix}{key}", f"{value:.4g}"
        elif value is not None:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _rendered(
    template: str, *, title: str, subtitle: str, sections: Sequence[Section], values: Mapping[str, Any]
) -> str:
    return (
        _templates()
        .get_template(template)
        .render(
            {
                **values,
                "title": title,
                "subtitle": subtitle,
                "sections": sections,
                "version": __version__,
                "policy": _policy(),
                # Ours, and meant as they are.
                "style": Markup(_own_text("style.css")),
                "script": Markup(_own_text("script.js")),
            }
        )
    )


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("strucspars", "report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"zip": zip, "inline_drawing": inline_drawing}
    return environment


@cache
def _own_text(name: str) -> str:
    return (files("strucspars") / "report" / name).read_text(encoding="utf-8")


@cache
def _policy() -> str:
    """Only our own script and style count, by their hashes, and nothing is loaded: whatever might slip in is dead.

    Drawn figures have style attributes, which can neither run nor load anything under this policy.
    """
    return "; ".join(
        (
            "default-src 'none'",
            "img-src data:",
            f"script-src {_hash('script.js')}",
            f"style-src-elem {_hash('style.css')}",
            "style-src-attr 'unsafe-inline'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hash(name: str) -> str:
    digest = hashlib.sha256(_own_text(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
