import os
import re
from pathlib import Path

import pytest

from strucspars.train.run_folder import RunFolder, check_same_classes, store_classes, stored_classes


@pytest.mark.parametrize("classes", [("cat", "dog"), ("Käfer", "甲虫"), (os.fsdecode(b"caf\xe9"), "a\nb")])
def test_any_folder_names_come_back_in_their_order(tmp_path: Path, classes: tuple[str, ...]) -> None:
    store_classes(RunFolder(tmp_path), classes)
    assert stored_classes(RunFolder(tmp_path)) == classes


def test_fixed_classes_leave_no_file_not_even_that_of_an_earlier_attempt(tmp_path: Path) -> None:
    store_classes(RunFolder(tmp_path), ["cat"])
    store_classes(RunFolder(tmp_path), None)
    assert list(tmp_path.iterdir()) == []
    assert stored_classes(RunFolder(tmp_path)) is None


@pytest.mark.parametrize("text", ["{}", '["cat", 3]', '"cat"'])
def test_a_file_without_names_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(ValueError, match=r"classes\.json: (\[1\]: must be text|must be a list, each text)"):
        stored_classes(RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (["ant", "cat", "bee"], "output 1 means 'bee' in the run, 'cat' in the data"),
        (["ant", "bee"], "output 2 means 'cat' in the run, no class in the data"),
        (["ant", "bee", "cat", "dog"], "output 3 means no class in the run, 'dog' in the data"),
    ],
)
def test_the_first_class_that_differs_is_named(tmp_path: Path, now: list[str], difference: str) -> None:
    store_classes(RunFolder(tmp_path), ["ant", "bee", "cat"])
    with pytest.raises(ValueError, match=f"has other classes than the zoo: {re.escape(difference)}; give the data of"):
        check_same_classes(RunFolder(tmp_path), now, data="the zoo")


@pytest.mark.parametrize(("before", "now"), [(["ant"], ["ant"]), (["ant"], None), (None, ["ant"]), (None, None)])
def test_equal_classes_and_those_that_nobody_named_are_accepted(
    tmp_path: Path, before: list[str] | None, now: list[str] | None
) -> None:
    store_classes(RunFolder(tmp_path), before)
    check_same_classes(RunFolder(tmp_path), now, data="the zoo")
