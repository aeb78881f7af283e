"""Reports in a real browser."""

from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import NoAlertPresentException
from selenium.webdriver.support.ui import Select

from strucspars.report.contents import comparison_contents
from strucspars.report.page import RunLink, overview_page
from strucspars.report.reading import read_run

RESULTS = Path(__file__).parents[2] / "results" / "cifar10"
DESKTOP, PHONE = 1280, 390
Pages = dict[str, Path]
PAGES = ("overview", "finished", "unfinished")


def shown_layers(browser: Any) -> list[str]:
    return [layer.get_attribute("id") for layer in browser.all(".layer") if layer.is_displayed()]


def column(browser: Any, number: int) -> list[str]:
    return [cell.text for cell in browser.all(f"#table-layers tbody td:nth-child({number})")]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_a_word_on_the_console(browser: Any, pages: Pages, name: str) -> None:
    browser.open(pages[name])
    assert browser.console() == []
    assert browser.script("document.readyState") == "complete"


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_its_screen(
    browser: Any, pages: Pages, screenshots: Path, name: str, width: int, scheme: str
) -> None:
    browser.open(pages[name], width=width, scheme=scheme)
    assert browser.script("document.documentElement.scrollWidth") <= width
    picture = screenshots / f"{name}-{width}-{scheme}.png"
    browser.screenshot(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_comparison_with_the_paper_fits_a_desktop(browser: Any, tmp_path: Path) -> None:
    runs = [read_run(path) for path in sorted(RESULTS.iterdir())]
    links = [RunLink(run=run, title=run.name, address="") for run in runs]
    page = tmp_path / "index.html"
    page.write_text(overview_page(comparison_contents(runs), links), encoding="utf-8")
    browser.open(page, width=DESKTOP)
    for table in ("accuracy", "timeline"):
        box = f"document.querySelector('#table-{table} .scroll')"
        assert browser.script(f"{box}.scrollWidth") <= browser.script(f"{box}.clientWidth")


def test_the_list_chooses_the_layer(browser: Any, pages: Pages) -> None:
    browser.open(pages["finished"])
    select = Select(browser.all("select.layers")[0])
    assert len(select.options) == 6
    for place in (4, 0, 5):
        select.select_by_index(place)
        assert shown_layers(browser) == [f"layer-{place + 1}"]


def test_the_buttons_go_from_layer_to_layer_and_stop_at_the_ends(browser: Any, pages: Pages) -> None:
    browser.open(pages["finished"])
    previous, following = browser.all(".chooser button")
    Select(browser.all("select.layers")[0]).select_by_index(1)
    previous.click()
    assert shown_layers(browser) == ["layer-1"]
    assert not previous.is_enabled()
    for _ in range(5):
        following.click()
    assert shown_layers(browser) == ["layer-6"]
    assert not following.is_enabled()


def test_the_layer_table_leads_to_the_layer(browser: Any, pages: Pages) -> None:
    browser.open(pages["finished"])
    link = next(each for each in browser.all("#table-layers a") if each.text == "block2.conv1")
    browser.driver.execute_script("arguments[0].click()", link)
    (shown,) = (layer for layer in browser.all(".layer") if layer.is_displayed())
    assert shown.get_attribute("aria-label") == "block2.conv1"


def test_matrices_of_the_chosen_layer_are_loaded_and_drawn(browser: Any, pages: Pages) -> None:
    browser.open(pages["finished"])
    images = browser.all(".layer.chosen image")
    assert len(images) >= 3
    assert all(image.size["width"] > 50 and image.size["height"] > 50 for image in images)


def test_a_click_sorts_another_turns_it_round_and_a_third_undoes_it(browser: Any, pages: Pages) -> None:
    browser.open(pages["finished"])
    original = column(browser, 1)
    heading = browser.all("#table-layers th")[0]
    orders = []
    for _ in range(3):
        heading.find_element("css selector", "button").click()
        orders.append((heading.get_attribute("aria-sort"), column(browser, 1)))
    by_name = ["block1.conv1", "block1.conv2", "block2.conv1", "block10.conv1", "stem", "wide"]
    assert orders == [("ascending", by_name), ("descending", by_name[::-1]), ("none", original)]


def test_numbers_sort_by_value_and_one_column_at_a_time(browser: Any, pages: Pages) -> None:
    browser.open(pages["finished"])
    headings = browser.all("#table-layers th")
    number = next(place for place, each in enumerate(headings) if "number" in (each.get_attribute("class") or ""))
    for place in (0, number):
        headings[place].find_element("css selector", "button").click()
    cells = browser.all(f"#table-layers tbody td:nth-child({number + 1})")
    values = [float(text) for cell in cells if (text := cell.get_attribute("data-sort"))]
    assert values == sorted(values)
    assert [each.get_attribute("aria-sort") for each in headings].count("ascending") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_button_changes_between_light_and_dark_and_is_remembered(browser: Any, pages: Pages, scheme: str) -> None:
    page = pages["finished"]
    browser.open(page, scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    assert (browser.script(background) == "rgb(255, 255, 255)") == (scheme == "light")

    def is_remembered() -> bool:
        shown = browser.script(background)
        browser.all("button.theme")[0].click()
        chosen = browser.script(background)
        assert chosen != shown
        browser.open(page, scheme=scheme)
        return bool(browser.script(background) == chosen)

    # A busy browser hands storage on late, and another page's change of it may come after this one's.
    assert any(is_remembered() for _ in range(20)), "the choice is not remembered"
    browser.script("localStorage.clear()")


def test_print_shows_no_controls_and_all_of_the_table_on_white(browser: Any, pages: Pages) -> None:
    browser.open(pages["finished"], scheme="dark", media="print")
    assert not any(element.is_displayed() for element in browser.all("nav, button.theme, .chooser"))
    assert browser.script("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.script("getComputedStyle(document.querySelector('#table-layers .scroll')).overflow") == "visible"


def test_the_overview_leads_to_every_run_and_back(browser: Any, pages: Pages) -> None:
    browser.open(pages["overview"])
    for name in ("finished", "unfinished"):
        browser.driver.find_element("link text", name).click()
        assert browser.all("h1")[0].text == name
        browser.driver.find_element("link text", "all runs").click()
    assert browser.console() == []


def test_hostile_names_run_nothing_and_add_no_element(browser: Any, pages: Pages, hostile_page: Path) -> None:
    def elements(page: Path) -> list[str]:
        browser.open(page)
        # Of the overview, only the other page knows.
        names = "Array.from(document.querySelectorAll('main *'), element => element.localName)"
        found: list[str] = browser.script(names)
        return found

    hostile, ordinary = elements(hostile_page), elements(pages["finished"])
    for name in ("img", "script", "style", "iframe", "select", "option", "section", "td", "h3", "a", "image", "pre"):
        assert hostile.count(name) == ordinary.count(name)
    browser.open(hostile_page)
    assert browser.console() == []
    with pytest.raises(NoAlertPresentException):
        _ = browser.driver.switch_to.alert.text
    assert "<img src=x onerror=alert(1)>" in browser.all("h1")[0].text
    assert not browser.all("[onerror], img, body script")


def test_all_layers_can_be_read_without_scripts(browser: Any, pages: Pages) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(pages["finished"])
        assert len(shown_layers(browser)) == 6
        assert not any(element.is_displayed() for element in browser.all(".chooser, button.theme"))
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
