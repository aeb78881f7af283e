"""Reading run folders: all that is whole is read, all that is not is named."""

import json
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


def test_a_whole_run_has_all_parts_and_no_problems(path: Path) -> None:
    run = read_run(path)
    assert run.problems == ()
    assert run.is_finished
    assert run.state == "finished"
    assert run.name == "run"
    assert run.recipe == small_recipe()
    assert run.summary is not None
    assert run.plan is not None
    assert dict(run.weight_shapes) == SHAPES
    assert [layers.epoch for layers in run.dynamics] == [1, 2, 3, 4]
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
    assert run.state == "in stage sparsify, epoch 4 of 4"
    assert not run.is_finished
    assert run.summary is None
    assert run.plan is None
    assert run.problems == ()


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
    assert read_run(path).state == "in stage finetune, epoch 2 of 3"


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
    assert run.state == "before its first epoch's end"
    assert run.problems == ("environment.json is missing",)
    assert run_contents(run).figures == ()


def test_a_torn_last_line_is_no_problem(path: Path) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"stage":"finetune","ep')
    run = read_run(path)
    assert run.problems == ()
    assert len(run.rows) == 8


# The rows of 4 epochs, of the compression, and of 3 epochs.
LACKING = {
    "the last three": (range(5), "lacks 3 of 8 rows, first epoch 1 of finetune:"),
    "the first": (range(1, 8), "lacks 1 of 8 rows, first epoch 1 of sparsify:"),
    "two in the middle": ((0, 1, 2, 3, 5, 7), "lacks 2 of 8 rows, first the compression's:"),
    "all but one": ((2,), "lacks 7 of 8 rows, first epoch 1 of sparsify:"),
}


def keep_rows(path: Path, kept: Iterable[int], *, torn: str = "") -> None:
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[place] for place in kept) + torn)


@pytest.mark.parametrize("torn", ["", '{"stage":"fine'])
@pytest.mark.parametrize("case", LACKING)
def test_rows_that_a_finished_run_lacks_are_named(path: Path, case: str, torn: str) -> None:
    kept, words = LACKING[case]
    keep_rows(path, kept, torn=torn)
    run = read_run(path)
    assert run.state == "finished"
    assert run.problems == (f"metrics.jsonl {words} curves and times are shown without them",)


def test_a_run_in_progress_lacks_only_rows_before_its_last(unfinished: Path) -> None:
    keep_rows(unfinished, (0, 1))
    assert read_run(unfinished).problems == ()
    keep_rows(unfinished, (1,))
    assert "metrics.jsonl lacks 1 of 2 rows, first epoch 1 of sparsify" in read_run(unfinished).problems[0]


def test_a_row_that_a_run_in_progress_lacks_in_the_middle_is_named(unfinished: Path) -> None:
    keep_rows(unfinished, (0, 2))
    assert "metrics.jsonl lacks 1 of 3 rows, first epoch 2 of sparsify" in read_run(unfinished).problems[0]


def test_a_run_with_another_runs_first_stage_does_not_lack_its_rows(path: Path) -> None:
    keep_rows(path, range(4, 8))
    recipe = replace(small_recipe(), sparsify=replace(small_recipe().sparsify, from_run="elsewhere"))
    (path / "recipe.yaml").write_text(recipe_yaml(recipe))
    assert not any("metrics.jsonl" in problem for problem in read_run(path).problems)


def test_a_recipe_that_asks_for_countless_epochs_is_no_obstacle(path: Path) -> None:
    recipe = (path / "recipe.yaml").read_text()
    (path / "recipe.yaml").write_text(recipe.replace("epochs: 3\n", f"epochs: {10**30}\n"))
    (problem,) = read_run(path).problems
    assert problem.startswith(f"metrics.jsonl lacks {10**30 - 3} of {10**30 + 5} rows, first epoch 4 of finetune")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "is not valid JSON"),
        ("[1]", "must be a JSON object, got list"),
        ('{"stage": "<b>", "epoch": 1}', "is of no stage that is known here"),
        ('{"stage": "finetune", "epoch": "1"}', "must have an epoch"),
        ('{"stage": "finetune", "epoch": 1, "test_top1": "x"}', "must have a number for test_top1"),
        ('{"stage": "finetune", "epoch": 1, "test_top1": 1e300}', "must have a number for test_top1"),
    ],
)
def test_a_damaged_line_is_named_and_left_out(path: Path, line: str, words: str) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    run = read_run(path)
    assert len(run.rows) == 8
    (problem,) = run.problems
    assert problem.startswith("metrics.jsonl, line 9:")
    assert words in problem


def test_many_damaged_lines_are_counted(path: Path) -> None:
    (path / "metrics.jsonl").write_text("no\n" * 10)
    problems = read_run(path).problems
    assert [problem.partition(" is")[0] for problem in problems[:3]] == [
        f"metrics.jsonl, line {number}:" for number in (1, 2, 3)
    ]
    assert problems[3] == "7 more lines of metrics.jsonl are damaged"


def test_a_number_beyond_all_bounds_is_as_if_it_were_not_there(path: Path) -> None:
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[3]) | {"removed_fraction": 1e300}
    (path / "metrics.jsonl").write_text("".join([*lines[:3], f"{json.dumps(row)}\n", *lines[4:]]))
    rows = read_run(path).rows
    assert [row.get("removed_fraction") for row in rows[2:4]] == [pytest.approx(0.3), None]


def test_problems_name_files_from_the_run_folder_on(path: Path) -> None:
    for name in ("plan.json", "summary.json", "dynamics/sparsify-0002.npz"):
        (path / name).write_bytes(b"{")
    problems = read_run(path).problems
    assert len(problems) >= 3
    assert not any(str(path) in problem for problem in problems)


def test_a_part_that_the_system_refuses_is_named_in_words(path: Path) -> None:
    (path / "metrics.jsonl").unlink()
    (path / "metrics.jsonl").mkdir()
    assert "cannot read metrics.jsonl: Is a directory; choose the path of a file" in read_run(path).problems


def test_layers_that_the_plan_does_not_know_are_named_and_the_plan_is_believed(path: Path) -> None:
    layers = json.loads((path / "layers.json").read_text())
    layers[0]["weight_shape"] = [16, 4, 1, 1]
    (path / "layers.json").write_text(json.dumps(layers))
    run = read_run(path)
    assert dict(run.weight_shapes) == SHAPES
    assert run.problems == ("layers.json and plan.json speak of different layers; the plan is believed",)


@pytest.mark.parametrize("shape", [[0, 4, 1, 1], [8], [8, 4, 1, 1, 1, 1], [8, "4"]])
def test_layers_of_impossible_shapes_are_named(unfinished: Path, shape: list[object]) -> None:
    (unfinished / "layers.json").write_text(json.dumps([{"name": "conv", "weight_shape": shape}]))
    run = read_run(unfinished)
    assert dict(run.weight_shapes) == {}
    assert any("'conv' has no weight shape" in problem for problem in run.problems)


DAMAGES = {
    "recipe.yaml": "recipe.yaml",
    "summary.json": "summary.json",
    "plan.json": "plan.json",
    "layers.json": "layers.json",
    "environment.json": "environment.json",
    "decisions.json": "decisions.json",
    "dynamics/sparsify-0002.npz": "sparsify-0002.npz",
    "importance/start.npz": "start.npz",
    "importance/end.npz": "end.npz",
}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b"\xff\xfe\x00", b"PK\x03\x04"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_part_is_named_and_the_rest_shown(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    run = read_run(path)
    # These are valid: an empty list of layers next to a plan, and objects that may hold anything.
    is_valid = (name, content) in {
        ("environment.json", b'{"a": 1}'),
        ("decisions.json", b'{"a": 1}'),
        ("layers.json", b"[]"),
    }
    assert is_valid or any(DAMAGES[name] in problem for problem in run.problems)
    assert len(run.rows) == 8


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_with_everything_damaged_but_the_metrics_the_curves_are_shown(path: Path, content: bytes) -> None:
    for name in DAMAGES:
        (path / name).write_bytes(content)
    contents = run_contents(read_run(path))
    assert {figure.name for figure in contents.figures} == {"dynamics", "churn"}
    assert "stages" in {table.name for table in contents.tables}


MISSING = {
    "recipe.yaml": "recipe.yaml is missing",
    "environment.json": "environment.json is missing",
    "plan.json": "plan.json is missing: there are no groups to show",
    "dynamics": "dynamics/ lacks 4 of 4 epochs: levels and churn are shown without them",
    "importance/start.npz": "importance/start.npz is missing: there are no matrices of that moment",
    "importance/end.npz": "importance/end.npz is missing: there are no matrices of that moment",
    "dynamics/sparsify-0003.npz": "dynamics/ lacks 1 of 4 epochs: levels and churn are shown without them",
    "metrics.jsonl": "metrics.jsonl is missing or empty: there are no curves",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_part_is_named_once_and_the_rest_shown(path: Path, name: str) -> None:
    target = path / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    run = read_run(path)
    assert run.problems == (MISSING[name],)
    assert headlines(run)


def test_a_reduced_run_still_shows_curves_groups_and_mean_churn(path: Path) -> None:
    for name in ("dynamics", "importance", "checkpoints", "tensorboard"):
        shutil.rmtree(path / name)
    contents = run_contents(read_run(path))
    assert {"dynamics", "cardinality", "churn"} <= {figure.name for figure in contents.figures}
    assert all(layer.permuted is None for layer in contents.layers)


def test_an_epoch_with_a_level_that_the_layer_cannot_have_is_damaged(path: Path) -> None:
    file = path / "dynamics" / "sparsify-0003.npz"
    arrays: dict[str, Any] = load_arrays(file)
    arrays["group_level"] = np.array([200, 1], dtype=np.uint8)
    save_arrays(file, arrays)
    run = read_run(path)
    assert [layers.epoch for layers in run.dynamics] == [1, 2, 4]
    assert any("sparsify-0003.npz" in problem and "group_level" in problem for problem in run.problems)


def test_an_epoch_with_a_churn_that_is_no_number_is_damaged(path: Path) -> None:
    file = path / "dynamics" / "sparsify-0001.npz"
    arrays: dict[str, Any] = load_arrays(file)
    arrays["churn"] = np.array([np.nan, 0.0], dtype=np.float32)
    save_arrays(file, arrays)
    assert [layers.epoch for layers in read_run(path).dynamics] == [2, 3, 4]


def test_an_epoch_with_an_order_that_is_none_is_damaged(path: Path) -> None:
    file = path / "dynamics" / "sparsify-0002.npz"
    arrays: dict[str, Any] = load_arrays(file)
    arrays["in_perm"][1] = arrays["in_perm"][0]
    save_arrays(file, arrays)
    run = read_run(path)
    assert [layers.epoch for layers in run.dynamics] == [1, 3, 4]
    assert any("sparsify-0002.npz is damaged" in problem for problem in run.problems)


def test_negative_and_transposed_matrices_are_left_out(path: Path) -> None:
    negative = {"block.conv1": np.full((8, 4), -1, dtype=np.float16), "block.conv2": np.ones((8, 8), dtype=np.float16)}
    save_arrays(path / "importance" / "end.npz", negative)
    save_arrays(path / "importance" / "start.npz", {"block.conv1": np.ones((4, 8), dtype=np.float16)})
    run = read_run(path)
    assert {moment: list(matrices) for moment, matrices in run.importance.items()} == {
        "start": [],
        "end": ["block.conv2"],
    }


def test_matrices_of_foreign_layers_or_with_bad_numbers_are_left_out(path: Path) -> None:
    save_arrays(
        path / "importance" / "end.npz",
        {
            "block.conv1": np.full((8, 4), np.nan, dtype=np.float16),
            "block.conv2": np.ones((8, 8), dtype=np.float16),
            "foreign": np.ones((2, 2), dtype=np.float16),
        },
    )
    run = read_run(path)
    assert list(run.importance["end"]) == ["block.conv2"]
    assert len(run.problems) == 2


def test_what_a_killed_run_wrote_beyond_its_last_row_is_not_shown(path: Path) -> None:
    shutil.copy(path / "dynamics" / "sparsify-0004.npz", path / "dynamics" / "sparsify-0005.npz")
    assert [layers.epoch for layers in read_run(path).dynamics] == [1, 2, 3, 4]
    # The last row of the first stage counts, whatever epochs the second has come to.
    keep_rows(path, (0, 1, 4, 5, 6, 7))
    assert [layers.epoch for layers in read_run(path).dynamics] == [1, 2]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ValueError, match=r"is not a run folder: it has none of recipe\.yaml"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        read_run(tmp_path / "missing")


def test_a_dense_run_lacks_nothing(tmp_path: Path) -> None:
    recipe = replace(small_recipe(), kind="dense")
    write_fabricated_run(tmp_path / "run", Fabrication(weight_shapes=SHAPES, recipe=recipe))
    for name in ("plan.json", "layers.json"):
        (tmp_path / "run" / name).unlink()
    for name in ("dynamics", "importance"):
        shutil.rmtree(tmp_path / "run" / name)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)[-recipe.stage2.epochs :]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(rows).replace('"finetune"', '"train"'))
    assert read_run(tmp_path / "run").problems == ()


def test_reading_writes_nothing(path: Path) -> None:
    def state() -> dict[str, Any]:
        return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}

    before = state()
    run_contents(read_run(path))
    assert state() == before


def test_a_bench_that_is_no_report_is_named(path: Path) -> None:
    (path / "bench.json").write_text(json.dumps({"format": "other"}))
    run = read_run(path)
    assert run.bench is None
    assert run.problems == ("bench.json is not a report of strucspars bench",)
