"""What the outputs of a network mean is kept with its run: data with other classes are refused, not mixed up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from table2_recipes import write_image_folder

from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run import RunInterrupted
from strucspars.train.run_folder import RunFolder

Recipes = Callable[..., Recipe]
Stops = Callable[[int], Callable[[], bool]]
CLASSES = ["class0000", "class0001", "class0002"]
MIXED_UP = r"output 0 means 'class0000' in the run, 'a' in the data; give the data of that run"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_image_folder(root, num_classes=len(CLASSES), train_images=2, test_images=1)
    return root


@pytest.fixture(scope="module")
def renamed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images, their last class now the first."""
    root = Path(shutil.copytree(images, tmp_path_factory.mktemp("renamed") / "images"))
    for split in ("train", "val"):
        (root / split / CLASSES[-1]).rename(root / split / "a")
    return root


def folder_recipe(small_recipe: Recipes, images: Path, *overrides: str) -> Recipe:
    data = ("data.name=folder", f"data.root={images}", "data.batch_size=4", "data.image_size=28", "data.workers=0")
    return small_recipe(*data, "stage1.epochs=1", "stage2.epochs=1", *overrides)


def begun(recipe: Recipe, path: Path, stop_after: Stops) -> RunFolder:
    with pytest.raises(RunInterrupted):
        run_pipeline(recipe, path, should_stop=stop_after(1))
    return RunFolder(path)


def test_a_run_on_other_classes_does_not_go_on_and_on_its_own_it_does(
    small_recipe: Recipes, images: Path, renamed: Path, tmp_path: Path, stop_after: Stops
) -> None:
    recipe = folder_recipe(small_recipe, images)
    folder = begun(recipe, tmp_path / "run", stop_after)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=MIXED_UP):
        run_pipeline(folder_recipe(small_recipe, renamed), folder.path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run_pipeline(recipe, folder.path)
    assert json.loads(folder.classes_path.read_text()) == CLASSES


def test_a_run_of_before_classes_were_kept_goes_on_and_keeps_them(
    small_recipe: Recipes, images: Path, tmp_path: Path, stop_after: Stops
) -> None:
    recipe = folder_recipe(small_recipe, images)
    folder = begun(recipe, tmp_path / "run", stop_after)
    folder.classes_path.unlink()
    run_pipeline(recipe, folder.path)
    assert json.loads(folder.classes_path.read_text()) == CLASSES


def test_neither_a_first_stage_nor_a_teacher_of_other_classes_is_taken(
    small_recipe: Recipes, images: Path, renamed: Path, tmp_path: Path
) -> None:
    run_pipeline(folder_recipe(small_recipe, images), tmp_path / "run")
    for option in ("sparsify.from_run", "finetune.teacher"):
        with pytest.raises(ValueError, match=MIXED_UP):
            run_pipeline(folder_recipe(small_recipe, renamed, f"{option}={tmp_path / 'run'}"), tmp_path / option)


def test_data_with_fixed_classes_leave_none(small_recipe: Recipes, tmp_path: Path, stop_after: Stops) -> None:
    assert not begun(small_recipe(), tmp_path / "run", stop_after).classes_path.exists()


def add_image(root: Path) -> None:
    shutil.copy(next((root / "train" / CLASSES[0]).iterdir()), root / "train" / CLASSES[0] / "another.png")


def rename_image(root: Path) -> None:
    image = next((root / "val" / CLASSES[1]).iterdir())
    image.rename(image.with_stem("zzz"))


def change_class(root: Path) -> None:
    image = next((root / "train" / CLASSES[2]).iterdir())
    image.rename(root / "train" / CLASSES[1] / f"of-another-class{image.suffix}")


@pytest.mark.parametrize("kind", ["strucspars", "dense"])
@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (add_image, "6 to learn from and 3 to test on, now 7 to learn from and 3 to test on"),
        (rename_image, "6 to learn from and 3 to test on, of other names or classes"),
        (change_class, "6 to learn from and 3 to test on, of other names or classes"),
    ],
)
def test_a_run_does_not_go_on_with_other_images(
    kind: str,
    change: Callable[[Path], None],
    counts: str,
    small_recipe: Recipes,
    images: Path,
    tmp_path: Path,
    stop_after: Stops,
) -> None:
    root = Path(shutil.copytree(images, tmp_path / "images"))
    recipe = folder_recipe(small_recipe, root, f"kind={kind}")
    folder = begun(recipe, tmp_path / "run", stop_after)
    change(root)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=f"other images than when the run began.*there were {counts}"):
        run_pipeline(recipe, folder.path)
    assert before == {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


def test_a_run_goes_on_with_the_same_images_elsewhere_their_classes_renamed(
    small_recipe: Recipes, images: Path, tmp_path: Path, stop_after: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(folder_recipe(small_recipe, images, "kind=dense"), tmp_path / "run", stop_after)
    moved = Path(shutil.copytree(images, tmp_path / "moved"))
    for split in ("train", "val"):
        (moved / split / CLASSES[0]).rename(moved / split / "first")
        for name in CLASSES[1:]:
            (moved / split / name).rename(moved / split / f"later-{name}")
    folder.classes_path.unlink()
    monkeypatch.chdir(moved)
    run_pipeline(folder_recipe(small_recipe, Path(), "kind=dense"), folder.path)
    assert folder.summary_json_path.exists()
