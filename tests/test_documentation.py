"""Documentation that runs: every Python block of the README and of docs/, with the output shown beneath it."""

import contextlib
import io
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import recipe_options_page

from strucspars.train.recipe_reading import read_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)(?P<target>[^)#]+)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = ""
    for block in BLOCK.finditer(page.read_text()):
        if block["language"] == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(block["text"], name_of(page), "exec"), names)
            printed = output.getvalue()
        elif block["language"] == "text" and printed:
            assert printed == block["text"]
            printed = ""
    assert not printed, "a block prints something that the page does not show"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of)
def test_the_links_of_a_page_lead_to_files(page: Path) -> None:
    for link in LINK.finditer(page.read_text()):
        assert (page.parent / link["target"]).exists(), link["target"]


def test_decisions_are_numbered_without_gaps_and_name_their_evidence() -> None:
    notes = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    assert [int(note.name[:4]) for note in notes] == list(range(1, len(notes) + 1))
    for note in notes:
        text = note.read_text()
        for part in ("**The paper says.**", "**The original does.**", "**We do.**", "**Evidence.**"):
            assert part in text, f"{note.name} lacks {part}"


def test_every_decision_named_in_the_code_exists() -> None:
    for source in (ROOT / "src").rglob("*.py"):
        for name in re.findall(r"docs/decisions/[\w-]+\.md", source.read_text()):
            assert (ROOT / name).exists(), f"{source.name} names {name}"


def test_the_page_of_recipe_options_is_that_of_the_code() -> None:
    assert recipe_options_page.PAGE.read_text() == recipe_options_page.page()


def test_the_file_and_the_command_on_the_page_of_recipe_options_ask_for_the_same(tmp_path: Path) -> None:
    blocks = {block["language"]: block["text"] for block in BLOCK.finditer(recipe_options_page.PAGE.read_text())}
    path = tmp_path / "my-recipe.yaml"
    path.write_text(blocks["yaml"])
    _, _, source, *overrides = shlex.split(blocks["bash"])
    by_command, by_file = read_recipe(source, overrides), read_recipe(path)
    assert by_file != read_recipe(source)
    assert by_file == replace(by_command, name="my-recipe")


def test_the_files_and_names_that_the_documentation_points_to_exist() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text()):
            assert (ROOT / name).exists() or (ROOT / "src/strucspars" / name).exists(), f"{page.name} names {name}"
    for row in re.findall(r"`(\w+/\w+\.py)`((?: `\w+[^`/]*`,?)*)", (ROOT / "docs/paper-to-code.md").read_text()):
        source = (ROOT / "src/strucspars" / row[0]).read_text()
        for name in re.findall(r"`(\w+)[`(](?!/)", row[1]):
            assert re.search(rf"(def|class) {name}\b", source), f"{row[0]} has no {name}"
