from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_identity import changes, check_same_run, identity, protocol
from strucspars.train.recipe_reading import recipe_yaml
from strucspars.train.run import RunInterrupted
from strucspars.train.run_folder import RunFolder

Recipes = Callable[..., Recipe]
SHORT = ("kind=dense", "stage2.epochs=2", "data.batch_size=256")


def begun(recipe: Recipe, path: Path) -> None:
    asked = iter(range(100))
    with pytest.raises(RunInterrupted):
        run_pipeline(recipe, path, should_stop=lambda: next(asked) > 3)


@pytest.mark.parametrize(
    "elsewhere", ["data.root=/elsewhere", "data.workers=9", "data.download=true", "engine.device=cpu"]
)
def test_a_run_may_go_on_elsewhere(elsewhere: str, small_recipe: Recipes, tmp_path: Path) -> None:
    begun(small_recipe(*SHORT), tmp_path / "run")
    moved = small_recipe(*SHORT, elsewhere)
    assert identity(moved) == identity(small_recipe(*SHORT))
    run_pipeline(moved, tmp_path / "run")
    assert elsewhere.split("=")[1] in RunFolder(tmp_path / "run").recipe_path.read_text()


@pytest.mark.parametrize("other", ["seed=4", "stage2.lr=0.2", "engine.precision=bf16", "data.batch_size=128"])
def test_another_run_does_not_go_on_in_a_folder(other: str, small_recipe: Recipes, tmp_path: Path) -> None:
    begun(small_recipe(*SHORT), tmp_path / "run")
    before = RunFolder(tmp_path / "run").recipe_path.read_text()
    with pytest.raises(ValueError, match="holds a run with another recipe"):
        run_pipeline(small_recipe(*SHORT, other), tmp_path / "run")
    assert RunFolder(tmp_path / "run").recipe_path.read_text() == before


@pytest.mark.parametrize("count", [8, 9])
def test_another_recipe_is_refused_with_eight_of_the_keys_that_differ(
    count: int, small_recipe: Recipes, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    recipe = small_recipe(*SHORT, "model.name=small_networks:plain")
    folder.summary_json_path.touch()
    folder.write_recipe(recipe_yaml(replace(recipe, model=replace(recipe.model, name="\x1b[2J" + "x" * 1000))))
    differing = [*(f"stage1.{key}=0.25" for key in ("lr", "momentum", "weight_decay", "label_smoothing", "ema"))]
    differing += ["stage2.ema=0.5", "stage2.lr=0.25", "seed=9"][: count - 6]
    with pytest.raises(ValueError, match="holds a run with another recipe") as caught:
        check_same_run(folder, small_recipe(*SHORT, *differing))
    first, *lines, last = str(caught.value).splitlines()
    assert first == f"{tmp_path} holds a run with another recipe:"
    assert "  stage1.lr: 0.1 there, 0.25 now" in lines
    (name,) = (line for line in lines if line.startswith("  model.name: '\\x1b[2Jxxx"))
    assert name.endswith("xxx' there, 'small_networks:plain' now")
    assert len(name) < 200
    assert lines[8:] == ([] if count == 8 else ["  and 1 more"])
    assert last == "give the recipe of that run, use another folder, or delete this one"


def test_options_that_a_kind_does_not_read_make_no_other_run(small_recipe: Recipes, tmp_path: Path) -> None:
    begun(small_recipe(*SHORT, "slimming.strength=1e-5"), tmp_path / "run")
    run_pipeline(small_recipe(*SHORT, "slimming.strength=1e-3"), tmp_path / "run")
    weak, strong = (small_recipe("kind=slimming", f"slimming.strength={strength}") for strength in (1e-5, 1e-3))
    assert changes(strong, weak) == ("slimming.strength=0.001",)


def test_a_run_that_could_not_begin_leaves_the_folder_free(small_recipe: Recipes, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_pipeline(small_recipe(*SHORT, "data.name=cifar10", "data.root=/nowhere"), tmp_path / "run")
    with pytest.raises(ValueError, match="target"):
        run_pipeline(small_recipe("sparsify.target=0.999"), tmp_path / "run")
    run_pipeline(small_recipe(*SHORT), tmp_path / "run")


def test_a_teacher_whose_folder_names_foreign_code_is_refused(small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe(*SHORT), tmp_path / "teacher")
    recipe = tmp_path / "teacher" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("small_networks:", "os:"))
    with pytest.raises(ValueError, match="code that a folder names"):
        run_pipeline(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'teacher'}"), tmp_path / "run")


def test_a_run_may_go_on_when_what_it_starts_from_has_moved(small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe(*SHORT), tmp_path / "here" / "teacher")
    begun(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'here' / 'teacher'}"), tmp_path / "run")
    (tmp_path / "here").rename(tmp_path / "there")
    run_pipeline(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'there' / 'teacher'}"), tmp_path / "run")
    assert RunFolder(tmp_path / "run").summary_json_path.is_file()


def test_another_teacher_makes_another_run(small_recipe: Recipes, tmp_path: Path) -> None:
    for name in ("one", "other"):
        run_pipeline(small_recipe(*SHORT), tmp_path / name)
    begun(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'one'}"), tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run with another recipe"):
        run_pipeline(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'other'}"), tmp_path / "run")


def test_a_teacher_of_the_same_name_with_other_weights_makes_another_run(small_recipe: Recipes, tmp_path: Path) -> None:
    for place, seed in (("here", 1), ("there", 2)):
        run_pipeline(small_recipe(*SHORT, f"seed={seed}"), tmp_path / place / "teacher")
    begun(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'here' / 'teacher'}"), tmp_path / "run")
    before = RunFolder(tmp_path / "run").load_checkpoint()
    with pytest.raises(ValueError, match=r"train began with other contents of .*teacher/model\.safetensors, so"):
        run_pipeline(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'there' / 'teacher'}"), tmp_path / "run")
    after = RunFolder(tmp_path / "run").load_checkpoint()
    assert before is not None
    assert after is not None
    assert before["digests"] == after["digests"]
    run_pipeline(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'here' / 'teacher'}"), tmp_path / "run")


def test_a_teacher_that_is_not_finished_is_refused(small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe(*SHORT), tmp_path / "teacher")
    RunFolder(tmp_path / "teacher").summary_json_path.unlink()
    with pytest.raises(ValueError, match="teacher is not the folder of a finished run"):
        run_pipeline(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'teacher'}"), tmp_path / "run")


def test_a_teacher_of_other_data_is_refused(small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe(*SHORT), tmp_path / "teacher")
    recipe = tmp_path / "teacher" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: digits", "name: cifar10"))
    with pytest.raises(ValueError, match="teacher was trained on cifar10, this run learns from digits"):
        run_pipeline(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'teacher'}"), tmp_path / "run")


def test_a_slimmed_network_is_no_teacher(small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe(*SHORT), tmp_path / "teacher")
    recipe = tmp_path / "teacher" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("kind: dense", "kind: slimming"))
    with pytest.raises(ValueError, match=r"finetune.teacher: .* is a run of kind slimming; name a dense one"):
        run_pipeline(small_recipe(*SHORT, f"finetune.teacher={tmp_path / 'teacher'}"), tmp_path / "run")


@pytest.mark.parametrize(
    "elsewhere", ["engine.cuda_graph=false", "engine.solver_workers=3", "engine.device=cpu", "data.download=true"]
)
def test_what_computes_is_no_part_of_a_run(elsewhere: str, small_recipe: Recipes) -> None:
    assert identity(small_recipe(elsewhere)) == identity(small_recipe("engine.device=auto"))


def test_runs_of_one_row_have_teachers_of_one_row(small_recipe: Recipes) -> None:
    one, again, other = (
        small_recipe("kind=dense", f"finetune.teacher={teacher}")
        for teacher in ("here/large-seed1", "there/large-seed2", "here/small-seed1")
    )
    assert protocol(one) == protocol(again)
    assert changes(one, other) == ("finetune.teacher=large",)
    assert changes(one, small_recipe("kind=dense")) == ("finetune.teacher=large",)


def test_other_weights_to_start_from_make_another_run(small_recipe: Recipes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_recipe(recipe_yaml(small_recipe("model.weights=here/one.pt")))
    (folder.checkpoints / "last.pt").write_bytes(b"")
    check_same_run(folder, small_recipe("model.weights=there/one.pt"))
    with pytest.raises(ValueError, match="holds a run with another recipe"):
        check_same_run(folder, small_recipe("model.weights=here/other.pt"))
