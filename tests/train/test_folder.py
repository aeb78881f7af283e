import errno
import gzip
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strucspars.bench.machine import environment
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.io.arrays import load_arrays
from strucspars.io.files import UNFINISHED
from strucspars.train.run_folder import RunFolder, RunFolderBusy

RECIPE = "data: digits\nepochs: 3\nmodel:\n  name: resnet20\nseed: 0\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.create()
    folder.write_recipe(RECIPE)
    return folder


def plan() -> GroupingPlan:
    layer = LayerPlan(group_level=2, out_perm=np.array([1, 0]), in_perm=np.array([0, 1]), weight_shape=(2, 2, 3, 3))
    return GroupingPlan({"conv": layer}, removed_param_fraction=0.5)


def test_everything_has_its_place_inside_the_folder(folder: RunFolder) -> None:
    places = {name: value for name, value in vars(folder).items() if name not in ("path", "lock_path")}
    assert {name: place.name for name, place in places.items()} == {
        "recipe_path": "recipe.yaml",
        "environment_path": "environment.json",
        "classes_path": "classes.json",
        "plan_path": "plan.json",
        "metrics_path": "metrics.jsonl",
        "decisions_path": "decisions.json",
        "summary_json_path": "summary.json",
        "summary_text_path": "summary.txt",
        "model_path": "model.safetensors",
        "checkpoints": "checkpoints",
        "dynamics": "dynamics",
        "importance": "importance",
        "tensorboard": "tensorboard",
    }
    assert all(place.parent == folder.path for place in places.values())
    assert all(place.is_dir() for place in (folder.checkpoints, folder.dynamics, folder.importance, folder.tensorboard))


def test_a_run_folder_is_taken_again_as_it_is(folder: RunFolder) -> None:
    folder.save_checkpoint({"epoch": 1})
    RunFolder(folder.path).create()
    assert folder.load_checkpoint() == {"epoch": 1}


def test_a_run_killed_before_its_recipe_was_there_can_begin_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    with folder.locked():
        (tmp_path / f"{UNFINISHED}x1").mkdir()
        (tmp_path / f"{UNFINISHED}x1" / "recipe.yaml").write_text("da")
    RunFolder(tmp_path).create()
    folder.write_recipe(RECIPE)
    assert folder.recipe_path.read_text() == RECIPE


@pytest.mark.parametrize("name", ["thesis.tex", "metrics.jsonl", "checkpoints/best.pt", ".git/config"])
def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    entries = list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=rf"holds {name.split('/')[0]}, but no recipe\.yaml: .*choose an empty one"):
        RunFolder(tmp_path).create()
    assert list(tmp_path.iterdir()) == entries


@pytest.mark.parametrize(("count", "listed"), [(3, "0, 1, 2, but"), (4, "0, 1, 2 and more, but")])
def test_of_many_foreign_files_three_are_named(tmp_path: Path, count: int, listed: str) -> None:
    for number in range(count):
        (tmp_path / str(number)).touch()
    with pytest.raises(ValueError, match=f"{tmp_path} holds {listed} no recipe"):
        RunFolder(tmp_path).create()


def test_no_run_moves_in_where_one_shot_compression_has_left_its_network(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path in (folder.recipe_path, folder.model_path):
        path.write_text("precious")
    entries = sorted(tmp_path.iterdir())
    with pytest.raises(
        ValueError, match=rf"{tmp_path} holds a network of one-shot .*; choose another folder with --out"
    ):
        folder.create()
    assert sorted(tmp_path.iterdir()) == entries


@pytest.mark.parametrize(
    ("below", "complaint"),
    [
        ("", "is a file; choose another path"),
        ("run", "Not a directory; a file exists where a folder is needed; choose another path"),
        ("deep/run", "Not a directory; a file exists where a folder is needed; choose another path"),
    ],
)
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str, complaint: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises((ValueError, OSError), match=rf"/file.*{complaint}"):
        RunFolder(tmp_path / "file" / below).create()
    assert (tmp_path / "file").read_text() == "precious"


def test_a_file_in_the_place_of_a_subfolder_is_named(folder: RunFolder) -> None:
    folder.importance.rmdir()
    folder.importance.touch()
    with pytest.raises(FileExistsError, match=r"run/importance: File exists; a file exists where a folder is needed"):
        folder.create()


def test_an_unwritable_parent_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(PermissionError, match=r"run: Permission denied; change its permissions or those of its folder"):
        RunFolder(tmp_path / "run").create()


def test_two_processes_cannot_share_a_folder(folder: RunFolder) -> None:
    with folder.locked(), pytest.raises(RunFolderBusy, match=f"{folder.path} is in use by process {os.getpid()}"):
        RunFolder(folder.path).locked().__enter__()


def test_a_recipe_is_replaced_whole(folder: RunFolder) -> None:
    folder.write_recipe("seed: 1\n")
    assert folder.recipe_path.read_text() == "seed: 1\n"


@pytest.mark.parametrize(
    "trace", ["summary.json", "model.safetensors", "checkpoints/last.pt", "checkpoints/previous.pt"]
)
def test_a_run_is_begun_once_there_is_something_to_go_on_from(folder: RunFolder, trace: str) -> None:
    assert not folder.is_begun
    (folder.path / trace).touch()
    assert folder.is_begun


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(folder: RunFolder) -> None:
    leftovers = [place / f"{UNFINISHED}x1" / "last.pt" for place in (folder.path, folder.checkpoints)]
    kept = [folder.recipe_path, folder.checkpoints / "last.pt", folder.path / "unfinished"]
    # No folder, so nothing of ours.
    kept.append(folder.path / f"{UNFINISHED}notes")
    for path in (*leftovers, *kept):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    folder.remove_leftovers()
    assert [path.exists() for path in (*leftovers, *kept)] == [False, False, True, True, True, True]
    assert not any(path.parent.exists() for path in leftovers)


def test_json_values_come_back_and_missing_ones_are_none(folder: RunFolder) -> None:
    assert folder.read_json(folder.environment_path) is None
    folder.write_json(folder.environment_path, environment())
    assert folder.read_json(folder.environment_path) == environment()
    folder.write_json(folder.summary_json_path, {"accuracy": float("nan"), "net": "größer"})
    assert folder.read_json(folder.summary_json_path) == {"accuracy": None, "net": "größer"}
    with pytest.raises(ValueError, match=r"summary\.json\['accuracy'\] is a torch.Tensor"):
        folder.write_json(folder.summary_json_path, {"accuracy": torch.tensor(1)})


def test_metrics_go_back_to_the_checkpoint(folder: RunFolder) -> None:
    for epoch in range(3):
        folder.append_metrics({"epoch": epoch})
    folder.rewind_metrics(1)
    folder.append_metrics({"epoch": 1, "again": True})
    assert folder.metrics() == [{"epoch": 0}, {"epoch": 1, "again": True}]


def test_checkpoints_come_back(folder: RunFolder) -> None:
    assert folder.load_checkpoint() is None
    folder.save_checkpoint({"epoch": 1})
    folder.save_checkpoint({"epoch": 2})
    assert folder.load_checkpoint() == {"epoch": 2}
    assert (folder.checkpoints / "previous.pt").exists()


def test_the_plan_comes_back(folder: RunFolder) -> None:
    assert folder.load_plan() is None
    folder.save_plan(plan())
    assert folder.load_plan() == plan()


def test_the_packed_plan_and_metrics_of_a_record_are_read_as_the_plain_ones(folder: RunFolder) -> None:
    folder.save_plan(plan())
    folder.append_metrics({"epoch": 1})
    for path in (folder.plan_path, folder.metrics_path):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert (folder.load_plan(), folder.metrics()) == (plan(), [{"epoch": 1}])
    folder.plan_path.write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json: "):  # the plain file is the current one
        folder.load_plan()


def test_arrays_of_an_epoch_come_back(folder: RunFolder) -> None:
    folder.save_epoch_arrays("sparsify", 3, {"layer1.0/levels": np.arange(4)})
    (path,) = folder.dynamics.iterdir()
    assert path.name == "sparsify-0003.npz"
    np.testing.assert_array_equal(load_arrays(path)["layer1.0/levels"], np.arange(4))


def test_subfolders_that_were_lost_are_made_again(folder: RunFolder) -> None:
    # A copy may leave out what is empty.
    folder.checkpoints.rmdir()
    folder.dynamics.rmdir()
    folder.save_checkpoint({"epoch": 1})
    folder.save_epoch_arrays("sparsify", 0, {"levels": np.arange(4)})
    assert folder.load_checkpoint() == {"epoch": 1}
    assert [path.name for path in folder.dynamics.iterdir()] == ["sparsify-0000.npz"]


def test_decisions_come_back(folder: RunFolder) -> None:
    assert folder.remembered("finetune_form") is None
    folder.remember("finetune_form", "masked")
    folder.remember("min_kept_norm", 0.1 + 0.2)
    again = RunFolder(folder.path)
    assert (again.remembered("finetune_form"), again.remembered("min_kept_norm")) == ("masked", 0.1 + 0.2)


def test_decisions_that_are_no_object_are_refused(folder: RunFolder) -> None:
    folder.decisions_path.write_text("[]")
    with pytest.raises(ValueError, match=r"decisions\.json: must be a mapping, got \[\]"):
        folder.remembered("form")


class Hostile:
    """Unpickling creates the marker folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def read_everything(folder: RunFolder) -> list[Any]:
    return [
        lambda: folder.read_json(folder.environment_path),
        lambda: folder.read_json(folder.summary_json_path),
        lambda: folder.remembered("form"),
        lambda: folder.remember("form", 1),
        folder.load_plan,
        folder.load_checkpoint,
        lambda: folder.rewind_metrics(1),
    ]


@pytest.mark.parametrize("kind", ["pickle", "torch", "python", "yaml", "null", "deep"])
def test_hostile_files_in_every_place_execute_nothing_and_are_refused(
    folder: RunFolder, tmp_path: Path, kind: str
) -> None:
    marker = tmp_path / "marker"
    if kind == "torch":
        torch.save(Hostile(marker), tmp_path / "hostile")
    contents = {
        "pickle": pickle.dumps(Hostile(marker)),
        "torch": (tmp_path / "hostile").read_bytes() if kind == "torch" else b"",
        "python": f"__import__('os').mkdir({str(marker)!r})\n".encode(),
        "yaml": f"!!python/object/apply:os.mkdir ['{marker}']\n".encode(),
        "null": b"\x00" * 100 + b"\n",
        "deep": b"[" * 100_000 + b"\n",
    }
    files = ["recipe.yaml", "environment.json", "summary.json", "decisions.json", "plan.json", "metrics.jsonl"]
    for name in [*files, "checkpoints/last.pt", "checkpoints/previous.pt"]:
        (folder.path / name).write_bytes(contents[kind])
    folder.create()
    for read in read_everything(folder):
        with pytest.raises(ValueError, match=str(folder.path)):
            read()
    assert not marker.exists()


def test_files_that_are_folders_are_errors_that_name_them(folder: RunFolder) -> None:
    for path in (folder.plan_path, folder.decisions_path, folder.environment_path):
        path.mkdir()
    for read in (folder.load_plan, lambda: folder.remembered("x"), lambda: folder.read_json(folder.environment_path)):
        with pytest.raises(IsADirectoryError, match=r"cannot read .*\.json: Is a directory"):
            read()


def test_a_finished_run_is_no_network_of_one_shot_compression(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.model_path.touch()
    assert folder.is_one_shot
    folder.summary_json_path.write_text("{}")
    assert not folder.is_one_shot
