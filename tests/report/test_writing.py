"""Reports on disk: every file has what its name says, and every link leads to its run."""

import re
from pathlib import Path
from typing import Any

import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from matplotlib.figure import Figure

from strucspars.report.page import WrittenReport, file_names, write_report
from strucspars.report.reading import read_run

SHAPES = {"conv1": (8, 4, 3, 3), "conv2": (8, 8, 1, 1)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Three folders, of which two have one name."""
    place = tmp_path_factory.mktemp("runs")
    paths = (place / "a" / "run", place / "b" / "run", place / "other")
    for seed, path in enumerate(paths):
        write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe(seed=seed)))
    return paths


@pytest.fixture(scope="module")
def written(runs: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> WrittenReport:
    """A report of all of them, with empty figures: drawing takes most of the time."""

    def savefig(figure: Figure, file: Any, *, format: str, transparent: bool = False, metadata: Any = None) -> None:
        file.write('<svg xmlns="http://www.w3.org/2000/svg"></svg>' if format == "svg" else b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        patch.setattr(Figure, "draw_without_rendering", lambda figure: None)
        return write_report([read_run(path) for path in runs], tmp_path_factory.mktemp("report") / "out")


def test_names_are_different_without_capitals_and_not_too_long_for_any_disk() -> None:
    assert file_names(["resnet 20/a", "resnet 20/b", "resnet 20/a", ".."]) == [
        "resnet-20-a",
        "resnet-20-b",
        "resnet-20-a-2",
        "run",
    ]
    assert file_names(["Run", "run", "RUN"]) == ["Run", "run-2", "RUN-3"]
    assert len(file_names(["a" * 300])[0]) == 80


def test_every_link_of_the_overview_leads_to_the_page_of_its_run(
    runs: tuple[Path, ...], written: WrittenReport
) -> None:
    links = dict(re.findall(r'<a href="(runs/[^"]*)">([^<]*)</a>', written.page.read_text()))
    # Of runs with one name, the paths are shown.
    assert list(links.values()) == [str(runs[0]), str(runs[1]), "other"]
    assert [written.page.parent / address for address in links] == list(written.run_pages)
    for seed, page in enumerate(written.run_pages):
        assert f"seed {seed} ·" in page.read_text()


def test_tables_are_csv_and_latex_with_the_same_numbers(written: WrittenReport) -> None:
    tables = written.page.parent / "tables"
    assert (tables / "runs.csv").read_text().startswith("run,network,data,seed,")
    for file in written.files:
        if file.suffix == ".tex":
            assert r"\begin{tabular}" in file.read_text()
            assert file.with_suffix(".csv") in written.files
    assert {"runs.tex", "accuracy.tex"} <= {file.name for file in tables.iterdir()}


def test_a_run_that_is_given_twice_is_refused_under_any_name(runs: tuple[Path, ...], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(runs[0])
    with pytest.raises(ValueError, match="given twice"):
        write_report([read_run(runs[0]), read_run(tmp_path / "link")], tmp_path / "out")
    assert not (tmp_path / "out").exists()
