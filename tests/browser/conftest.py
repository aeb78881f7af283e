"""A real browser for pages on disk, where there is one."""

import base64
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from strucspars.report.page import write_report
from strucspars.report.reading import RunData, read_run
from strucspars.train.recipe import Recipe

Pages = dict[str, Path]

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'</select></svg>"
SHAPES = {
    "stem": (16, 3, 3, 3),
    "block1.conv1": (16, 16, 1, 1),
    "block1.conv2": (32, 16, 3, 3),
    "block2.conv1": (64, 32, 1, 1),
    "block10.conv1": (12, 64, 1, 1),
    "wide": (256, 128, 1, 1),
}


@final
class Browser:
    """Chromium without a window, and what its console has said."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int = 1280, scheme: str = "light", media: str = "screen") -> None:
        """Open a file as a screen of that width shows it."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        self.driver.get(page.resolve().as_uri())

    def console(self) -> list[str]:
        """What the console said since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]  # in selenium

    def all(self, selector: str) -> list[WebElement]:
        """All elements of a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def script(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self.driver.execute_script(f"return {expression}")

    def screenshot(self, path: Path) -> None:
        """A picture of the whole page, not only of what fits the window."""
        height = self.script("document.documentElement.scrollHeight")
        width = self.script("window.innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        options = {"captureBeyondViewport": True, "clip": clip}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        path.write_bytes(base64.b64decode(shot["data"]))


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """Pages of fabricated runs: `finished`, `unfinished` and the `overview` of both, written once for all tests."""
    folder = tmp_path_factory.mktemp("reports")
    runs = [
        _fabricated(folder / "finished", small_recipe("finished"), SHAPES),
        _fabricated(folder / "unfinished", small_recipe("unfinished", seed=1), SHAPES),
    ]
    written = write_report(runs, folder / "both")
    return {"overview": written.page, "finished": written.run_pages[0], "unfinished": written.run_pages[1]}


@pytest.fixture(scope="session")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run like the finished one, with hostile names for all that has one."""
    folder = tmp_path_factory.mktemp("hostile")
    shapes = {f"{layer}{HOSTILE}": shape for layer, shape in SHAPES.items()}
    # A path cannot hold a slash within a name.
    run = _fabricated(folder / HOSTILE.replace("/", ""), small_recipe(HOSTILE), shapes)
    return write_report([run], folder / "report").page


def _fabricated(path: Path, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> RunData:
    fabrication = Fabrication(weight_shapes=shapes, recipe=recipe, is_finished=recipe.name != "unfinished")
    write_fabricated_run(path, fabrication)
    return read_run(path)


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go: the folder that SCREENSHOTS names, or one that is soon forgotten."""
    wanted = os.environ.get("SCREENSHOTS")
    folder = Path(wanted) if wanted else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    """Debian's Chromium; tests are skipped where it is not installed."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip(
            "chromium and chromedriver are not installed: `make browser` does that on Debian and Ubuntu, as root"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    # A container has neither the kernel's sandbox, nor a GPU, nor much shared memory.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


@pytest.fixture
def browser(chromium: webdriver.Chrome) -> Browser:
    """The browser with nothing left of the test before."""
    chromium.get("about:blank")
    browser = Browser(chromium)
    browser.console()
    return browser
