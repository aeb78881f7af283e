"""The page: what stands in it, and that nothing in it is more than text."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from matplotlib.figure import Figure

from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.report.contents import ComparisonContents, Headline, RunContents
from strucspars.report.drawing import NamedFigure
from strucspars.report.layers import Layer, layers_of
from strucspars.report.named_table import NamedTable
from strucspars.report.page import RunLink, overview_page, run_page, runs_table
from strucspars.report.reading import RunData, read_run

HOSTILE = """<script>alert(1)</script>"'><img src=x onerror=alert(2)></style>{{ 7 * 7 }}</script>"""
SHAPES = {"conv1": (8, 4, 3, 3), "conv2": (8, 8, 1, 1)}


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "": []}
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in self.texts else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._inside].append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of all elements of a kind."""
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        """All that is read."""
        return "".join(self.texts[""])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe()))
    return read_run(path)


def layer(run: RunData, name: str, *, groups: int, shape: tuple[int, ...] = (8, 4, 3, 3)) -> Layer:
    """A layer of a run that has no other one."""
    out_perm, in_perm = np.arange(shape[0]), np.arange(shape[1])
    planned = LayerPlan(group_level=groups.bit_length(), weight_shape=shape, out_perm=out_perm, in_perm=in_perm)
    plan = GroupingPlan({name: planned})
    matrices = {"end": {name: np.eye(*shape[:2], dtype=np.float32)}}
    (found,) = layers_of(replace(run, plan=plan, weight_shapes={name: shape}, importance=matrices))
    return replace(found, place=int(name[-1]) - 1 if name[-1].isdigit() else 0, kept_norm=(1.0, 0.75, 0.5))


def figure(name: str) -> NamedFigure:
    return NamedFigure(name=name, title=f"Title of {name}", caption="a caption", alt="an alt", figure=Figure())


def table(name: str, cell: str = "conv1") -> NamedTable:
    rows = ((cell, 1234), ("last", None))
    return NamedTable(name=name, title=f"Title of {name}", columns={"layer": "text", "params": "count"}, rows=rows)


def contents(run: RunData) -> RunContents:
    return RunContents(
        run=run,
        headlines=(Headline(label="parameters", value="12", note="half of 24"),),
        figures=(figure("dynamics"), figure("churn")),
        tables=(table("accuracy"), table("layers")),
        layers=(layer(run, "conv1", groups=1), layer(run, "conv2", groups=4)),
        command="strucspars run demo",
    )


def test_the_page_needs_nothing_from_elsewhere(run: RunData) -> None:
    page = Elements(run_page(contents(run)))
    for _, attributes in page.tags:
        for key in ("src", "href", "xlink:href", "srcset", "data", "action"):
            address = attributes.get(key)
            assert address is None or address.startswith(("data:image/png;base64,", "#"))
    assert not page.of("link")
    assert "@import" not in "".join(page.texts["style"])
    assert "url(" not in "".join(page.texts["style"])


def test_the_policy_allows_the_pages_own_script_and_style_and_no_other(run: RunData) -> None:
    page = Elements(run_page(contents(run)))
    (policy,) = (tag["content"] for tag in page.of("meta") if tag.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for kind in ("script", "style"):
        digest = hashlib.sha256("".join(page.texts[kind]).encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy
        assert len(page.of(kind)) == 1
    assert "script-src 'unsafe" not in policy


def test_every_entry_of_the_navigation_leads_somewhere(run: RunData) -> None:
    page = Elements(run_page(contents(run)))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    targets = {attributes["href"] for attributes in page.of("a")}
    assert {"#summary", "#figure-dynamics", "#layer-view", "#table-layers", "#repeat"} <= targets
    assert targets <= {f"#{name}" for name in ids}


def test_headlines_tables_recipe_environment_and_command_are_there(run: RunData) -> None:
    text = Elements(run_page(contents(run))).text
    for part in ("half of 24", "1,234", "lambda_warmup: 0.0", "made up", "finetune_form", "strucspars run "):
        assert part in text


def test_cells_sort_by_their_values_and_empty_ones_have_none(run: RunData) -> None:
    cells = Elements(run_page(contents(run))).of("td")
    assert "1234" in {cell.get("data-sort") for cell in cells}
    assert "" in {cell.get("data-sort") for cell in cells}


def test_cells_are_written_for_people_and_a_zero_sorts_as_one(run: RunData) -> None:
    rows = (("a", 0.0), ("b", 0.1234))
    shares = NamedTable(name="shares", title="Shares", columns={"layer": "text", "removed": "percent"}, rows=rows)
    page = Elements(run_page(replace(contents(run), tables=(shares,))))
    assert {"0.0", "0.1234"} <= {cell.get("data-sort") for cell in page.of("td")}
    assert "12.34%" in page.text
    assert "0.1234" not in page.text


def test_the_levels_of_a_layer_are_numbers_with_bars_and_its_own_is_marked(run: RunData) -> None:
    page = run_page(replace(contents(run), layers=(layer(run, "conv2", groups=2),)))
    _, _, levels = page.partition('<th scope="col" class="number">kept norm</th>')
    body = levels.partition("</tbody>")[0]
    numbers = re.findall(r'<td class="number">([^<]*)</td>', body)
    assert numbers == ["1", "1", "1.000", "2", "2", "0.750", "3", "4", "0.500"]
    assert re.findall(r'<rect width="([^"]*)"', body) == ["100.0", "75.0", "50.0"]
    assert [bool(mark) for mark in re.findall(r"<tr( class=\"chosen\")?>", body)] == [False, True, False]


def test_the_layer_with_the_most_groups_is_shown_first(run: RunData) -> None:
    page = Elements(run_page(contents(run)))
    chosen = [tag["id"] for tag in page.of("section") if "chosen" in (tag.get("class") or "").split()]
    assert chosen == ["layer-2"]
    assert [tag["value"] for tag in page.of("option") if "selected" in tag] == ["layer-2"]


def test_the_layer_table_leads_to_the_layers(run: RunData) -> None:
    assert "#layer-1" in {tag["href"] for tag in Elements(run_page(contents(run))).of("a")}


def test_the_groups_of_a_layer_are_drawn_over_its_matrix(run: RunData) -> None:
    paths = [tag["d"] for tag in Elements(run_page(contents(run))).of("path") if tag.get("class") == "blocks"]
    # Four blocks in the shape of the weight, 8 rows by 4 columns; the layer of one group has nothing to draw.
    assert paths == ["M0 0H12.5V25H0ZM12.5 25H25V50H12.5ZM25 50H37.5V75H25ZM37.5 75H50V100H37.5Z"]


def test_a_long_matrix_is_squeezed_so_that_its_short_side_is_to_be_seen(run: RunData) -> None:
    long = layer(run, "long", groups=1, shape=(1000, 4, 1, 1))
    page = Elements(run_page(replace(contents(run), layers=(long,))))
    boxes = {tag["viewbox"] for tag in page.of("svg") if "100.0" in (tag.get("viewbox") or "")}
    assert boxes == {"0 0 33.33 100.0"}


def test_numbers_of_a_figure_are_below_it(run: RunData) -> None:
    more = replace(
        contents(run),
        figures=(replace(figure("confusion"), tables=(table("confusion-1"),)),),
        tables=(table("accuracy"),),
    )
    page = run_page(more)
    summary, _, rest = page.partition('<section id="figure-confusion">')
    assert "Title of accuracy" in summary
    assert "Title of confusion-1" not in summary
    assert "Title of confusion-1" in rest


def test_a_run_that_has_only_begun_has_a_page(run: RunData) -> None:
    bare = replace(run, summary=None, rows=(), plan=None, environment={}, decisions={})
    nothing = RunContents(run=bare, headlines=(), figures=(), tables=(), layers=(), command="strucspars run demo")
    page = Elements(run_page(nothing))
    assert "before the end of its first epoch" in page.text
    assert not page.of("select")


def test_matrices_of_a_run_in_progress_are_not_called_those_of_the_compression(run: RunData) -> None:
    titles = {picture.title for each in layers_of(run) for picture in each.pictures}
    assert "S at compression" in titles
    begun = replace(run, plan=None, importance={"now": run.importance["end"]})
    titles = {picture.title for each in layers_of(begun) for picture in each.pictures}
    assert "S so far" in titles
    assert "S at compression" not in titles


def test_the_overview_links_every_run(run: RunData) -> None:
    links = [
        RunLink(run=run, title="first", address="runs/first/index.html"),
        RunLink(run=run, title="second", address="runs/second/index.html"),
    ]
    page = Elements(overview_page(ComparisonContents(figures=(figure("trade-off"),), tables=(table("one"),)), links))
    targets = {tag["href"] for tag in page.of("a")}
    assert {"runs/first/index.html", "runs/second/index.html", "#figure-trade-off", "#table-one"} <= targets


def test_the_table_of_runs_has_their_own_numbers(run: RunData) -> None:
    assert run.summary is not None
    summary = replace(
        run.summary,
        removed_param_fraction=0.3,
        removed_mac_fraction=0.4,
        finetuned=replace(run.summary.finetuned, last_top1=0.91, best_top1=0.92),
    )
    told = replace(run, recipe=replace(run.recipe, seed=3), summary=summary)
    (row,) = runs_table([RunLink(run=told, title="one", address="")]).rows
    assert row[:4] == ("one", "preact-resnet20", run.recipe.data.name, 3)
    assert row[4] == pytest.approx(0.3)
    assert row[5:] == (0.91, "finished")


def test_the_overview_says_how_many_runs_are_finished(run: RunData) -> None:
    def subtitle(*finished: bool) -> str:
        links = [
            RunLink(
                run=run if is_finished else replace(run, summary=None), title=str(place), address="runs/one/index.html"
            )
            for place, is_finished in enumerate(finished)
        ]
        return overview_page(ComparisonContents(figures=(), tables=()), links)

    assert "all of them finished" in subtitle(True, True)
    assert "2 of them finished" in subtitle(True, False, True)


def test_decisions_and_environments_are_told_one_fact_a_line(run: RunData) -> None:
    environment = {"device": "a GPU", "versions": {"torch": "2.9"}, "earlier": [{"device": "another"}]}
    page = run_page(contents(replace(run, environment=environment, decisions={"precision": "bf16"})))
    assert "device: a GPU\nversions:\n  torch: &#39;2.9&#39;\nearlier:\n- device: another\n" in page
    assert '<pre tabindex="0">precision: bf16' in page


def test_an_overview_of_unfinished_runs_says_that_there_is_nothing_to_compare(run: RunData) -> None:
    links = [RunLink(run=replace(run, summary=None), title="one", address="runs/one/index.html")]
    assert "nothing to compare yet" in overview_page(ComparisonContents(figures=(), tables=()), links)


def hostile_contents(run: RunData) -> RunContents:
    """A run in which everything that can be hostile is."""
    recipe = replace(run.recipe, name=HOSTILE, model=replace(run.recipe.model, name=HOSTILE))
    hostile = replace(
        run,
        path=Path(HOSTILE),
        name=HOSTILE,
        recipe=recipe,
        environment={HOSTILE: {HOSTILE: HOSTILE}},
        decisions={HOSTILE: [HOSTILE]},
    )
    texts: dict[str, Any] = {"title": HOSTILE, "caption": HOSTILE, "alt": HOSTILE}
    own_table = replace(table("layers", HOSTILE), title=HOSTILE, notes=(HOSTILE,))
    return replace(
        contents(hostile),
        headlines=(Headline(label=HOSTILE, value=HOSTILE, note=HOSTILE),),
        figures=(NamedFigure(name="dynamics", figure=hostile_figure(), **texts),),
        tables=(replace(own_table, columns={HOSTILE: "text", "n": "count"}),),
        layers=(layer(run, HOSTILE, groups=2),),
        command=HOSTILE,
    )


def hostile_figure() -> Figure:
    figure = Figure()
    figure.text(0.5, 0.5, HOSTILE)
    return figure


def test_hostile_names_add_no_element_and_stay_text(run: RunData) -> None:
    plain = contents(run)
    # Every word of a heading is an element.
    heading = " ".join("word" for _ in HOSTILE.split())
    same_shape = replace(
        plain,
        headlines=plain.headlines[:1],
        figures=(replace(plain.figures[0], figure=hostile_figure()),),
        tables=(replace(plain.tables[1], notes=("a note",), columns={heading: "text", "n": "count"}),),
        layers=(layer(run, "conv1", groups=2),),
        run=replace(run, environment={"a": {"b": "c"}}, decisions={"a": ["b"]}),
    )
    hostile = Elements(run_page(hostile_contents(run), overview=HOSTILE))
    ordinary = Elements(run_page(same_shape, overview="there"))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in ordinary.tags]
    assert not any(key.startswith("on") for _, attributes in hostile.tags for key in attributes)
    assert hostile.text.count(HOSTILE) > 10
    assert "49" not in re.findall(r"\b\d+\b", hostile.text)


def test_a_hostile_overview_adds_no_element(run: RunData) -> None:
    def page(name: str) -> Elements:
        told = replace(run, name=name)
        both = ComparisonContents(figures=(), tables=(table("one", name),))
        return Elements(overview_page(both, [RunLink(run=told, title=name, address="runs/one/index.html")]))

    assert [tag for tag, _ in page(HOSTILE).tags] == [tag for tag, _ in page("plain").tags]
