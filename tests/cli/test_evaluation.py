"""The command eval, where the data are not those of the run."""

from pathlib import Path
from typing import Any

import pytest
from table2_recipes import write_image_folder

SMALL = "model.name=tiny_networks:small"


@pytest.fixture
def finished(call: Any, tiny: tuple[str, ...]) -> Path:
    write_image_folder(Path("images"), num_classes=3, train_images=2)
    data = ("data.name=folder", "data.root=images", "data.image_size=28", "data.batch_size=4", "data.workers=0")
    assert call("run", "demo", *tiny, *data, "--quiet").status == 0
    return Path("runs/demo")


def test_eval_refuses_data_with_other_classes(call: Any, finished: Path) -> None:
    assert "the same" in call("eval", str(finished), SMALL).out
    for split in ("train", "val"):
        Path("images", split, "class0002").rename(Path("images", split, "a"))
    said = call("eval", str(finished), SMALL)
    assert said.status == 2
    assert said.out == ""
    assert "output 0 means 'class0000' in the run, 'a' in the data; give the data of that run" in said.err
    assert "Traceback" not in said.err


def test_eval_of_a_run_of_before_classes_were_kept_compares_none(call: Any, finished: Path) -> None:
    (finished / "classes.json").unlink()
    assert "the same" in call("eval", str(finished), SMALL).out
