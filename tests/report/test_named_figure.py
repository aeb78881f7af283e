"""Figures as files and as parts of a page."""

import re
import xml.etree.ElementTree as ElementTree

from matplotlib.figure import Figure

from strucspars.report.drawing import INK, NamedFigure, drawable, house_style

HOSTILE = "</text><script>alert(1)</script>$\\frac{&<b>"


def drawn(title: str = "plain", *, name: str = "some", alt: str = "a line") -> NamedFigure:
    with house_style():
        figure = Figure(figsize=(6, 3), layout="constrained")
        axis = figure.subplots()
        axis.plot([0, 1], [1, 2], label=title)
        axis.set_title(title)
        axis.legend()
    return NamedFigure(name=name, title=title, caption="", alt=alt, figure=figure)


def test_the_same_figure_gives_the_same_bytes_every_time() -> None:
    one, other = drawn(), drawn()
    assert one.svg() == other.svg() == one.svg()
    assert one.inline_svg() == other.inline_svg()
    assert one.png() == other.png() == one.png()
    assert one.png().startswith(b"\x89PNG")


def test_a_hostile_text_stays_a_text() -> None:
    figure = drawn(drawable(HOSTILE, 100), alt='"><script>alert(2)</script>')
    for text in (figure.svg(), figure.inline_svg()):
        tree = ElementTree.fromstring(text)
        assert not [element for element in tree.iter() if str(element.tag).endswith("script")]
        assert HOSTILE in "".join(tree.itertext())


def test_letters_that_xml_cannot_hold_are_replaced() -> None:
    ElementTree.fromstring(drawn(drawable("a\x00b\x1b\ud800\u202ec")).svg())
    assert drawable("a\x00b\x1bc") == "a?b?c"


def test_letters_that_the_font_lacks_raise_no_warning() -> None:
    assert "畳み込み" in drawn("畳み込み").svg()


def test_an_inline_figure_takes_the_pages_colours_and_width() -> None:
    text = drawn().inline_svg()
    assert INK not in text
    assert "currentColor" in text
    root = ElementTree.fromstring(text)
    assert root.get("width") == "100%"
    assert root.get("height") is None
    assert root.get("viewBox")
    assert (root.get("role"), root.get("aria-label")) == ("img", "a line")


def test_inline_figures_share_no_ids_and_all_their_references_lead_somewhere() -> None:
    texts = [drawn(name=name).inline_svg() for name in ("one", "other")]
    ids = [set(re.findall(r'\bid="([^"]*)"', text)) for text in texts]
    assert ids[0]
    assert not ids[0] & ids[1]
    for text, own in zip(texts, ids, strict=True):
        assert set(re.findall(r'(?:url\(#|href="#)([^")]*)', text)) <= own
