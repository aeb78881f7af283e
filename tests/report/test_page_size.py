"""Reports of large networks stay small enough to send and open."""

from pathlib import Path

from fabricated_run import Fabrication, network_shapes, small_recipe, write_fabricated_run

from strucspars.report.contents import run_contents
from strucspars.report.page import run_page
from strucspars.report.reading import read_run

LARGEST_BYTES = 8_000_000


def test_the_page_of_a_large_network_has_less_than_8_megabytes(tmp_path: Path) -> None:
    # Of torchvision's networks in the paper, that with the most layers has the largest page.
    network = "densenet201"
    shapes = network_shapes(network)
    recipe = small_recipe(network, model=network)
    write_fabricated_run(tmp_path / "run", Fabrication(weight_shapes=shapes, recipe=recipe))
    contents = run_contents(read_run(tmp_path / "run"))
    page = run_page(contents)
    assert len(contents.layers) == len(shapes) > 100
    assert page.count('<section class="layer') == len(shapes)
    assert len(page.encode()) < LARGEST_BYTES
