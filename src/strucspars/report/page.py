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
from strucspars.report.layer_view import LayerView
from strucspars.report.named_table import Cell, NamedTable, TableColumn
from strucspars.report.reading import RunData
from strucspars.train.recipe_reading import recipe_yaml

LAYER_TABLE = "layers"
# Figures of single layers are for print: the page shows every layer.
ONE_LAYER = "importance-"
# Figures above the layers themselves.
BEFORE_LAYERS = ("dynamics", "cardinality")
SHORT_TITLES = {"dynamics": "Training", "cardinality": "Groups", "confusion": "Mixing", "churn": "Churn"}
# The style sheet that matplotlib writes would apply to the whole page.
_STYLE_SHEET = re.compile(r"<style\b[^>]*>[^<]*</style>")


@dataclass(frozen=True, kw_only=True)
class RunLink:
    """A run on the overview page: its unique title, and the address of its own page relative to the overview."""

    run: RunData
    title: str
    address: str


def run_page(contents: RunContents, *, overview: str | None = None) -> str:
    """The page of one run; `overview` is the address of the page that compares it with others."""
    run = contents.run
    layers = contents.layers
    shown = [figure for figure in contents.figures if not figure.name.startswith(ONE_LAYER)]
    before = [figure for figure in shown if figure.name in BEFORE_LAYERS]
    after = [figure for figure in shown if figure.name not in BEFORE_LAYERS]
    layer_tables = [table for table in contents.tables if table.name == LAYER_TABLE]
    # `confusion-1` has numbers of the figure `confusion`.
    figure_tables = {
        figure.name: [table for table in contents.tables if table.name.startswith(f"{figure.name}-")]
        for figure in shown
    }
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
            # The layer with the most groups is shown first.
            "chosen": max(layers, key=lambda layer: layer.num_groups).id if layers else "",
            "layer_links": {layer.name: f"#{layer.id}" for layer in layers},
            # The stages in the recipe of a one-shot compression did not run.
            "recipe_text": "" if run.one_shot is not None else recipe_yaml(run.recipe),
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
            ("runs", "Runs"),
            *_figure_sections(contents.figures),
            *((f"table-{table.name}", table.title) for table in contents.tables),
        ],
        values={
            "contents": contents,
            "runs_table": runs_table(links),
            "run_links": {link.title: link.address for link in links},
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
            TableColumn(title="seed", unit="count"),
            TableColumn(title="removed parameters", unit="percent"),
            TableColumn(title="top-1", unit="percent"),
            TableColumn(title="state"),
        ),
        rows=tuple(_run_row(link) for link in links),
    )


def _run_row(link: RunLink) -> tuple[Cell, ...]:
    run = link.run
    removed = None if run.plan is None else run.plan.removed_param_fraction
    return (
        link.title,
        run.recipe.model.name,
        # One-shot compression reads no images and draws nothing at random.
        None if run.one_shot is not None else run.recipe.data.name,
        None if run.one_shot is not None else run.recipe.seed,
        removed if run.summary is None else run.summary.params.removed_fraction,
        None if run.summary is None else run.summary.finetuned.last_top1,
        run.state,
    )


def inline_drawing(figure: NamedFigure) -> Markup:
    """The figure as an element of the page."""
    return Markup(_STYLE_SHEET.sub("", figure.inline_svg()))


def _subtitle(run: RunData) -> str:
    recipe = run.recipe
    if run.one_shot is not None:
        return f"{recipe.model.name} · {run.state}"
    return f"{recipe.model.name} on {recipe.data.name}, recipe {recipe.name}, seed {recipe.seed} · {run.state}"


def _run_sections(
    before: Sequence[NamedFigure],
    layers: Sequence[LayerView],
    after: Sequence[NamedFigure],
    layer_tables: Sequence[NamedTable],
) -> Iterator[tuple[str, str]]:
    """The entries of the navigation: id of the element, a word or two."""
    yield "summary", "Summary"
    yield from _figure_sections(before)
    if layers:
        yield "layer-view", "Layers"
    yield from _figure_sections(after)
    for table in layer_tables:
        yield f"table-{table.name}", "Layer table"
    yield "repeat", "Repeat"


def _figure_sections(figures: Iterable[NamedFigure]) -> Iterator[tuple[str, str]]:
    for figure in figures:
        yield f"figure-{figure.name}", SHORT_TITLES.get(figure.name, figure.title)


def _facts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Plain values by dotted key, without empty ones."""
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
    template: str, *, title: str, subtitle: str, sections: Sequence[tuple[str, str]], values: Mapping[str, Any]
) -> str:
    page = {
        "title": title,
        "subtitle": subtitle,
        "sections": sections,
        "version": __version__,
        "policy": _policy(),
        # Our own files, which need no escaping.
        "style": Markup(_own_text("style.css")),
        "script": Markup(_own_text("script.js")),
    }
    return _templates().get_template(template).render({**values, **page})


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
    """Allow our own script and style by their hashes, and load nothing: other code in the page cannot run.

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
