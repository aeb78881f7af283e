"""Reading run folders: finished or in progress; damaged files are named."""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fabricated_run import Fabrication, small_recipe, write_fabricated_run

from strucspars.io.arrays import load_arrays, save_arrays
from strucspars.report.contents import headlines, run_contents
from strucspars.report.layers import layers_of
from strucspars.report.reading import read_run
from strucspars.train.recipe_reading import recipe_yaml
from strucspars.train.run_folder import RunFolder

SHAPES = {"block.conv1": (8, 4, 1, 1), "block.conv2": (8, 8, 3, 3)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe()))
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged: every row of a new one would wait for the disk."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    path = tmp_path / "unfinished"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe(), is_finished=False))
    return path


def test_a_whole_run_has_all_parts(path: Path) -> None:
    run = read_run(path)
    assert run.is_finished
    assert run.state == "finished"
    assert run.name == "run"
    assert run.recipe == small_recipe()
    assert run.summary is not None
    assert run.plan is not None
    assert dict(run.weight_shapes) == SHAPES
    assert len(run.dynamics) == 4
    assert {moment: list(matrices) for moment, matrices in run.importance.items()} == {
        "start": list(SHAPES),
        "end": list(SHAPES),
    }
    assert run.seconds == {"sparsify": 6.0, "compress": 1.5, "finetune": 4.5}
    assert run.decisions == {"finetune_form": "masked"}


def test_orders_of_an_epoch_are_told_apart_by_layer(path: Path) -> None:
    run = read_run(path)
    assert run.plan is not None
    for place, layer in enumerate(run.plan.layers.values()):
        np.testing.assert_array_equal(run.dynamics[-1].out_perm[place], layer.out_perm)
        np.testing.assert_array_equal(run.dynamics[-1].in_perm[place], layer.in_perm)


def test_a_run_in_its_first_stage_says_how_far_it_is(unfinished: Path) -> None:
    run = read_run(unfinished)
    assert run.state == "sparsify, epoch 4 of 4 done"
    assert not run.is_finished
    assert run.summary is None
    assert run.plan is None


def test_matrices_of_a_run_in_its_first_stage_come_from_its_checkpoint(unfinished: Path) -> None:
    weights = {f"{name}.weight": torch.full(shape, -2.0) for name, shape in SHAPES.items()}
    RunFolder(unfinished).save_checkpoint({"stage": "sparsify", "model": weights})
    now = read_run(unfinished).importance["now"]
    np.testing.assert_array_equal(now["block.conv1"], np.full((8, 4), 2.0))
    np.testing.assert_array_equal(now["block.conv2"], np.full((8, 8), 18.0))


def test_matrices_of_a_checkpoint_have_the_norm_of_the_recipe(unfinished: Path) -> None:
    recipe = replace(small_recipe(), sparsify=replace(small_recipe().sparsify, importance="l2"))
    (unfinished / "recipe.yaml").write_text(recipe_yaml(recipe))
    weights = {f"{name}.weight": torch.full(shape, -2.0) for name, shape in SHAPES.items()}
    RunFolder(unfinished).save_checkpoint({"stage": "sparsify", "model": weights})
    np.testing.assert_allclose(read_run(unfinished).importance["now"]["block.conv2"], np.full((8, 8), 6.0))


def test_a_checkpoint_gives_no_matrices_of_an_importance_other_than_a_norm(unfinished: Path) -> None:
    recipe = replace(small_recipe(), sparsify=replace(small_recipe().sparsify, importance="package.module:function"))
    (unfinished / "recipe.yaml").write_text(recipe_yaml(recipe))
    weights = {f"{name}.weight": torch.ones(shape) for name, shape in SHAPES.items()}
    RunFolder(unfinished).save_checkpoint({"stage": "sparsify", "model": weights})
    run = read_run(unfinished)
    assert list(run.importance) == ["start"]
    assert [layer.kept_norm for layer in layers_of(run)] == [
        tuple(kept[np.isfinite(kept)].tolist()) for kept in run.dynamics[-1].kept_norm
    ]


def test_weights_of_another_shape_or_of_a_later_stage_give_no_matrices(unfinished: Path) -> None:
    weights = {"block.conv1.weight": torch.ones(8, 4, 1, 1), "block.conv2.weight": torch.ones(4, 8, 3, 3)}
    RunFolder(unfinished).save_checkpoint({"stage": "sparsify", "model": weights})
    assert list(read_run(unfinished).importance["now"]) == ["block.conv1"]
    RunFolder(unfinished).save_checkpoint({"stage": "finetune", "model": weights})
    assert list(read_run(unfinished).importance) == ["start"]


def test_matrices_of_the_compression_are_stored_and_not_taken_from_a_checkpoint(path: Path) -> None:
    weights = {f"{name}.weight": torch.ones(shape) for name, shape in SHAPES.items()}
    RunFolder(path).save_checkpoint({"stage": "sparsify", "model": weights})
    assert list(read_run(path).importance) == ["start", "end"]


def test_a_run_in_its_second_stage_says_how_far_it_is(path: Path) -> None:
    keep_rows(path, range(7))
    (path / "summary.json").unlink()
    assert read_run(path).state == "finetune, epoch 2 of 3 done"


def test_a_run_is_called_by_its_folder_from_inside_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path)
    assert read_run(".").name == "run"


def test_a_run_right_after_compression_says_so(path: Path) -> None:
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:5]))
    (path / "summary.json").unlink()
    assert read_run(path).state == "compressed, not finetuned yet"


def test_a_run_that_has_only_begun_can_be_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_recipe("name: begun\n")
    run = read_run(folder.path)
    assert run.state == "before the end of its first epoch"
    assert run.environment == {}
    assert run_contents(run).figures == ()


def test_a_torn_last_line_is_no_damage(path: Path) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"stage":"finetune","ep')
    run = read_run(path)
    assert len(run.rows) == 8


def keep_rows(path: Path, kept: Iterable[int], *, torn: str = "") -> None:
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[place] for place in kept) + torn)


def test_a_torn_line_before_the_last_is_damage(path: Path) -> None:
    keep_rows(path, range(8), torn='{"stage":"fine\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 9"):
        read_run(path)


def test_values_that_are_no_numbers_are_left_out_of_the_rows(path: Path) -> None:
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[3]) | {"train_loss": "much", "lambda": None}
    (path / "metrics.jsonl").write_text("".join([*lines[:3], f"{json.dumps(row)}\n", *lines[4:]]))
    assert {"train_loss", "lambda"} & set(read_run(path).rows[3]) == set()


DAMAGES = (
    "recipe.yaml",
    "summary.json",
    "plan.json",
    "environment.json",
    "decisions.json",
    "metrics.jsonl",
    "bench.json",
    "dynamics/sparsify-0002.npz",
    "importance/start.npz",
    "importance/end.npz",
)


@pytest.mark.parametrize("content", [b"{\n", b"[]\n", b"\xff\xfe\x00\n", b"PK\x03\x04\n"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_an_error_that_names_it(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(name.rpartition("/")[2])):
        read_run(path)


@pytest.mark.parametrize("content", ["{", "[1]", '[{"name": "conv"}]', '[{"name": "conv", "weight_shape": ["x"]}]'])
def test_a_damaged_list_of_layers_is_an_error_before_the_compression(unfinished: Path, content: str) -> None:
    (unfinished / "layers.json").write_text(content)
    with pytest.raises(ValueError, match=r"layers\.json"):
        read_run(unfinished)


def test_what_others_have_removed_is_not_shown_and_no_damage(path: Path) -> None:
    for name in ("dynamics", "importance", "checkpoints", "tensorboard"):
        shutil.rmtree(path / name)
    for name in ("environment.json", "decisions.json", "layers.json"):
        (path / name).unlink()
    contents = run_contents(read_run(path))
    assert {figure.name for figure in contents.figures} >= {"dynamics", "cardinality", "churn"}
    assert headlines(contents.run)


DAMAGED_ARRAYS: dict[str, dict[str, Any]] = {
    "too few layers": {"group_level": np.array([1], dtype=np.uint8)},
    "an order that is none": {"in_perm": np.zeros(12, dtype=np.uint16)},
    "an order of another length": {"out_perm": np.arange(3, dtype=np.uint16)},
}


@pytest.mark.parametrize("damage", [*DAMAGED_ARRAYS, "a missing array"])
def test_an_epoch_that_does_not_fit_the_layers_is_damaged(path: Path, damage: str) -> None:
    file = path / "dynamics" / "sparsify-0002.npz"
    arrays: dict[str, Any] = load_arrays(file)
    arrays |= DAMAGED_ARRAYS.get(damage, {})
    if damage == "a missing array":
        del arrays["churn"]
    save_arrays(file, arrays)
    with pytest.raises(ValueError, match=r"sparsify-0002\.npz is damaged: it does not fit the run's 2 layers"):
        read_run(path)


def test_a_missing_epoch_is_an_error_that_names_its_file(path: Path) -> None:
    (path / "dynamics" / "sparsify-0002.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"sparsify-0002\.npz"):
        read_run(path)


MATRICES = {
    "transposed": {"block.conv1": np.ones((4, 8), dtype=np.float16)},
    "of another layer": {"foreign": np.ones((2, 2), dtype=np.float16)},
    "not finite": {"block.conv1": np.full((8, 4), np.nan, dtype=np.float16)},
}


@pytest.mark.parametrize("damage", MATRICES)
def test_matrices_that_do_not_fit_the_layers_are_damaged(path: Path, damage: str) -> None:
    save_arrays(path / "importance" / "end.npz", MATRICES[damage])
    with pytest.raises(ValueError, match=r"end\.npz is damaged: its matrix of layer"):
        read_run(path)


def test_what_a_killed_run_wrote_beyond_its_last_row_is_not_shown(path: Path) -> None:
    shutil.copy(path / "dynamics" / "sparsify-0004.npz", path / "dynamics" / "sparsify-0005.npz")
    assert len(read_run(path).dynamics) == 4
    # The last row of the first stage counts, whatever epochs the second has come to.
    keep_rows(path, (0, 1, 4, 5, 6, 7))
    assert len(read_run(path).dynamics) == 2


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ValueError, match=r"is not a run folder: it has no recipe\.yaml"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        read_run(tmp_path / "missing")


def test_reading_writes_nothing(path: Path) -> None:
    def state() -> dict[str, Any]:
        return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}

    before = state()
    run_contents(read_run(path))
    assert state() == before
