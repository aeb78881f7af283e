"""How large reports of large networks are, and how long a headless Chromium takes to open them.

    python benchmarks/report_opening.py

Runs are made up: the layers are those of the networks, the numbers are not. Needs the programs chromium and
chromedriver, and the package selenium. Prints JSON; opening times are the median and extremes of five.
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import describe
from fabricated_run import Fabrication, network_shapes, small_recipe, write_fabricated_run
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from strucspars.report.page import write_report
from strucspars.report.reading import read_run

NETWORKS = ("resnet50", "resnet101", "densenet201")
OPENINGS = 5


def main() -> None:
    """Write a report of each network, open it, and print what that took."""
    with tempfile.TemporaryDirectory() as place:
        outcomes = {name: _measured(name, Path(place) / name) for name in NETWORKS}
    print(json.dumps({"environment": describe(("selenium", "matplotlib", "jinja2")), "networks": outcomes}, indent=2))


def _measured(network: str, folder: Path) -> dict[str, Any]:
    shapes = network_shapes(network)
    write_fabricated_run(folder, Fabrication(weight_shapes=shapes, recipe=small_recipe(network, model=network)))
    begin = time.perf_counter()
    page = write_report([read_run(folder)], folder / "report").page
    written = time.perf_counter() - begin
    times = [_opening_seconds(page) for _ in range(OPENINGS)]
    return {
        "layers": len(shapes),
        "page_megabytes": page.stat().st_size / 1e6,
        "writing_seconds": written,
        "opening_seconds": {"median": statistics.median(times), "least": min(times), "most": max(times)},
    }


def _opening_seconds(page: Path) -> float:
    """From asking a started browser for the page until everything in it is loaded and drawn."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    browser, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver_path is None:
        sys.exit("install the programs chromium and chromedriver first: `make browser`")
    options.binary_location = browser
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    try:
        begin = time.perf_counter()
        driver.get(page.resolve().as_uri())
        # Two frames later what was loaded has been painted.
        driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));"
        )
        return time.perf_counter() - begin
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
