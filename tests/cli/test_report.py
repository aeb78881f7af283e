"""`strucspars report`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run

from strucspars.report.drawing import NamedFigure

SHAPES = {"conv1": (8, 4, 3, 3), "conv2": (8, 8, 1, 1)}


def fabricated(name: str, *, finished: bool = True) -> Path:
    path = Path("runs") / name
    recipe = small_recipe(name)
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=recipe, is_finished=finished))
    return path


@pytest.mark.usefixtures("undrawn")
def test_the_report_of_one_run_lies_in_its_folder(call: Any) -> None:
    run = fabricated("one")
    said = call("report", str(run))
    assert (said.status, said.out) == (0, "runs/one/report/index.html\n")
    assert "<h1>one</h1>" in (run / "report" / "index.html").read_text()


def test_a_report_can_be_written_again_and_is_the_same(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NamedFigure, "png", lambda figure: b"")  # takes half of the time
    run = fabricated("one")
    contents = []
    for _ in range(2):
        assert call("report", str(run)).status == 0
        files = sorted(path for path in (run / "report").rglob("*") if path.is_file())
        contents.append({path: path.read_bytes() for path in files})
    assert contents[0] == contents[1]


@pytest.mark.usefixtures("undrawn")
def test_several_runs_get_a_page_that_compares_them_and_one_each(call: Any) -> None:
    runs = [str(fabricated(name)) for name in ("one", "two")]
    said = call("report", *runs, "--out", "compared", "--json")
    document = json.loads(said.out)
    assert document["page"] == "compared/index.html"
    assert [run["page"] for run in document["runs"]] == [f"compared/runs/{name}/index.html" for name in ("one", "two")]
    files = document["files"]
    assert all(Path(file).is_file() for file in files)
    for suffix in (".svg", ".png", ".csv", ".tex"):
        assert any(file.endswith(suffix) and "/runs/" not in file for file in files)
        assert any(file.endswith(suffix) and "/runs/one/" in file for file in files)


@pytest.mark.usefixtures("undrawn")
def test_every_figure_and_table_is_a_file_in_both_forms(call: Any) -> None:
    call("report", str(fabricated("one")))
    for folder, forms in (("figures", {".svg", ".png"}), ("tables", {".csv", ".tex"})):
        found: dict[str, set[str]] = {}
        for path in (Path("runs/one/report") / folder).iterdir():
            found.setdefault(path.stem, set()).add(path.suffix)
        assert found
        assert set(map(frozenset, found.values())) == {frozenset(forms)}


@pytest.mark.usefixtures("undrawn")
def test_the_report_of_several_runs_lies_here_by_default(call: Any) -> None:
    said = call("report", str(fabricated("one")), str(fabricated("two", finished=False)))
    assert (said.status, said.out.splitlines()[-1]) == (0, "report/index.html")


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_run_is_named_and_no_report_is_written(call: Any) -> None:
    run = fabricated("one")
    (run / "plan.json").write_text("{")
    said = call("report", str(run), str(fabricated("two")))
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith("error: runs/one/plan.json: ")
    assert not Path("report").exists()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("arguments", [("nowhere",), (".",), ("runs/one", "runs/one"), ("runs/one", "--out", "mine")])
def test_wrong_use_is_one_line_and_writes_nothing(call: Any, arguments: tuple[str, ...]) -> None:
    fabricated("one")
    Path("mine").mkdir()
    Path("mine/notes").write_text("mine")
    before = sorted(Path().rglob("*"))
    said = call("report", *arguments)
    assert said.status == 2
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before


@pytest.mark.usefixtures("undrawn")
def test_a_failed_write_keeps_the_earlier_report(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fabricated("one")
    call("report", str(run))
    page = run / "report" / "index.html"
    before = page.read_bytes()
    write = Path.write_bytes

    def full(path: Path, data: Any) -> int:
        if path.name == "index.html":
            raise OSError(28, os.strerror(28))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    said = call("report", str(run))
    assert said.status == 1
    assert "what was there is kept; free some space" in said.err
    assert page.read_bytes() == before
    assert [path.name for path in run.iterdir() if path.name.startswith(".unfinished")] == []


def test_help_shows_examples(call: Any) -> None:
    assert "strucspars report runs/demo" in call("report", "--help").out
