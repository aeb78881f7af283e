"""A whole run on a folder of images: who reads them and when it is stopped makes no difference."""

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from table2_recipes import write_image_folder
from torch.nn import functional
from torchvision import transforms
from torchvision.datasets import ImageFolder

import strucspars as ss
from strucspars.core.plan import Preprocessing
from strucspars.models.catalogue import build_model
from strucspars.train.observer import RunObserver
from strucspars.train.outcome import RunSummary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run import Run, RunInterrupted, default_readers
from strucspars.train.run_folder import RunFolder

NETWORK = "small_networks:with_dropout"
CLASSES, TRAIN_IMAGES, TEST_IMAGES, BATCH_SIZE = 7, 2, 2, 4
# 14 images: the last batch is filled up with two that were there before.
STEPS = 4
QUESTIONS_PER_EPOCH = STEPS + 1
IMAGE_SIZE, RESIZE = 28, 32
WALL_CLOCK = {"seconds", "train_seconds", "solver_seconds"}
Recipes = Callable[..., Recipe]
Comparison = Callable[[Path, Path], None]
Stops = Callable[[int], Callable[[], bool]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_image_folder(root, num_classes=CLASSES, train_images=TRAIN_IMAGES, test_images=TEST_IMAGES)
    return root


def folder_recipe(small_recipe: Recipes, images: Path, *, workers: int) -> Recipe:
    return small_recipe(
        "data.name=folder",
        f"data.root={images}",
        f"data.batch_size={BATCH_SIZE}",
        f"data.image_size={IMAGE_SIZE}",
        f"data.workers={workers}",
        f"model.name={NETWORK}",
        "stage1.ema=0.8",
        "finetune.form=grouped",
    )


@pytest.fixture(scope="module")
def whole(small_recipe: Recipes, images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A run that nobody stopped, by the number of its workers."""
    paths = {workers: tmp_path_factory.mktemp("whole") / f"run{workers}" for workers in (0, 2)}
    for workers, path in paths.items():
        run_pipeline(folder_recipe(small_recipe, images, workers=workers), path)
    return paths


def test_a_teacher_speaks_of_the_classes_in_the_folders_only(
    small_recipe: Recipes, images: Path, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        for number, folder in zip((0, 2, 8), sorted((images / split).iterdir()), strict=False):
            shutil.copytree(folder, tmp_path / "some" / split / str(number))
    model = build_model(NETWORK, num_classes=10, image_shape=(3, IMAGE_SIZE, IMAGE_SIZE))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    recipe = folder_recipe(small_recipe, images, workers=0)
    some = replace(
        recipe,
        data=replace(recipe.data, root=str(tmp_path / "some"), num_classes=10),
        model=replace(recipe.model, weights=str(tmp_path / "weights.pt")),
        finetune=replace(recipe.finetune, teacher="weights"),
    )
    shown = Run(some, RunFolder(tmp_path / "run")).last_loss().shown
    assert shown is not None
    assert shown.tolist() == [0, 2, 8]
    teacher = tmp_path / "teacher"
    run_pipeline(replace(recipe, kind="dense", stage2=replace(recipe.stage2, epochs=1)), teacher)
    taught = replace(recipe, finetune=replace(recipe.finetune, teacher=str(teacher)))
    assert Run(taught, RunFolder(tmp_path / "run")).last_loss().shown is None
    in_memory = small_recipe("data.name=small_networks:three_digits", f"model.weights={tmp_path / 'digits.pt'}")
    torch.save(build_model(in_memory.model.name, num_classes=10).state_dict(), tmp_path / "digits.pt")
    in_memory = replace(in_memory, finetune=replace(in_memory.finetune, teacher="weights"))
    shown = Run(in_memory, RunFolder(tmp_path / "run")).last_loss().shown
    assert shown is not None
    assert shown.tolist() == [0, 1, 2]


def timeless(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in WALL_CLOCK}


def test_workers_change_neither_metrics_nor_plan_nor_weights(whole: dict[int, Path]) -> None:
    alone, helped = (RunFolder(whole[workers]) for workers in (0, 2))
    rows = [timeless(row) for row in alone.metrics()]
    assert [row["stage"] for row in rows] == ["sparsify", "sparsify", "compress", "finetune", "finetune"]
    assert rows == [timeless(row) for row in helped.metrics()]
    assert alone.plan_path.read_text() == helped.plan_path.read_text()
    ours, theirs = load_file(alone.model_path), load_file(helped.model_path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("workers", "stops"),
    [
        # In a second epoch, whose images are cropped otherwise; twice within a first epoch, of either stage.
        (0, [QUESTIONS_PER_EPOCH + 3]),
        (2, [1, 2, 2 * QUESTIONS_PER_EPOCH - 1, 1]),
    ],
)
def test_a_run_that_was_stopped_between_images_goes_on_to_the_same_end(
    workers: int,
    stops: list[int],
    small_recipe: Recipes,
    images: Path,
    whole: dict[int, Path],
    tmp_path: Path,
    assert_same_outcome: Comparison,
    stop_after: Stops,
) -> None:
    recipe = folder_recipe(small_recipe, images, workers=workers)
    for questions in stops:
        with pytest.raises(RunInterrupted, match=r"stopped in epoch [12] of (sparsify|finetune)"):
            run_pipeline(recipe, tmp_path / "run", should_stop=stop_after(questions))
        saved = RunFolder(tmp_path / "run").load_checkpoint()
        assert saved is not None
        assert 0 < saved["done_steps"] < STEPS
    run_pipeline(recipe, tmp_path / "run")
    assert_same_outcome(whole[workers], tmp_path / "run")


def test_the_accuracy_is_that_of_the_saved_network_on_the_papers_centre_crops(
    whole: dict[int, Path], images: Path
) -> None:
    folder = RunFolder(whole[0])
    summary = RunSummary.from_json(folder.read_json(folder.summary_json_path))
    crops = transforms.Compose(
        [
            transforms.Resize(RESIZE),
            transforms.CenterCrop(IMAGE_SIZE),
            transforms.ToTensor(),
            transforms.Normalize(Preprocessing().mean, Preprocessing().std),
        ]
    )
    samples = list(ImageFolder(str(images / "val"), transform=crops))
    assert len(samples) == CLASSES * TEST_IMAGES
    network = ss.load(folder.model_path, build_model(NETWORK, num_classes=CLASSES)).eval()
    with torch.no_grad():
        scores = network(torch.stack([image for image, _ in samples]))
    labels = torch.tensor([label for _, label in samples])
    assert summary.converted_top1 == (scores.argmax(dim=1) == labels).double().mean().item()
    loss = functional.cross_entropy(scores, labels).item()
    assert folder.metrics()[-1]["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_broken_image_stops_the_run_by_name_and_repaired_it_goes_on(
    small_recipe: Recipes, images: Path, whole: dict[int, Path], tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(images, tmp_path / "images"))
    broken = copied / "train" / "class0002" / "1.png"
    content = broken.read_bytes()
    broken.write_bytes(content[: len(content) // 2])
    recipe = folder_recipe(small_recipe, copied, workers=2)
    with pytest.raises(ValueError, match=r"^cannot read the image .*class0002/1\.png.*; replace or remove it$"):
        run_pipeline(recipe, tmp_path / "run")
    broken.write_bytes(content)
    run_pipeline(recipe, tmp_path / "run")
    rows = [timeless(row) for row in RunFolder(tmp_path / "run").metrics()]
    assert rows == [timeless(row) for row in RunFolder(whole[2]).metrics()]


class Killing(RunObserver):
    """Kills a process that reads images when the first epoch is over."""

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
        # Time for the system to tell of it.
        time.sleep(0.2)


def test_a_killed_reader_of_images_ends_the_run_in_a_sentence_and_it_can_go_on(
    small_recipe: Recipes, images: Path, whole: dict[int, Path], tmp_path: Path, assert_same_outcome: Comparison
) -> None:
    recipe = folder_recipe(small_recipe, images, workers=2)
    words = r"^a process that reads images has died \(killed by signal: Killed\).*; the same command resumes from "
    with pytest.raises(ChildProcessError, match=words):
        run_pipeline(recipe, tmp_path / "run", observers=[Killing()])
    run_pipeline(recipe, tmp_path / "run")
    assert_same_outcome(whole[2], tmp_path / "run")


def test_a_folder_without_test_images_is_refused_before_anything_is_trained(
    small_recipe: Recipes, images: Path, tmp_path: Path
) -> None:
    shutil.copytree(images / "train", tmp_path / "images" / "train")
    with pytest.raises(FileNotFoundError, match=r"no image folders under .*looked for .*val or .*test"):
        run_pipeline(folder_recipe(small_recipe, tmp_path / "images", workers=0), tmp_path / "run")
    assert RunFolder(tmp_path / "run").metrics() == []


def test_a_batch_of_more_images_than_there_are_to_learn_from_is_refused(
    small_recipe: Recipes, images: Path, tmp_path: Path
) -> None:
    recipe = folder_recipe(small_recipe, images, workers=0)
    larger = replace(recipe, data=replace(recipe.data, batch_size=10_000_000))
    words = "data.batch_size 10000000 is more than the 14 images to learn from; give at most 14, or more images"
    with pytest.raises(ValueError, match=words):
        run_pipeline(larger, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("cores", "readers"), [(1, 1), (3, 3), (16, 4)])
def test_unless_told_images_are_read_by_no_more_processes_than_there_are_cores(
    cores: int, readers: int, small_recipe: Recipes, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert default_readers() == readers
    # PyTorch asks the same, and warns of more, which is an error here.
    options = ("data.name=folder", f"data.root={images}", f"data.image_size={IMAGE_SIZE}", "data.batch_size=2")
    recipe = small_recipe(*options)
    assert recipe.data.workers is None
    assert Run(recipe, RunFolder("never made")).train.steps == 7


def test_processes_of_torchrun_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    for processes, readers in {"2": 3, "8": 1}.items():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert default_readers() == readers


def test_another_seed_gives_other_crops(small_recipe: Recipes, tmp_path: Path) -> None:
    # Of one image alone, twice, so that nothing but the crops can differ.
    write_image_folder(tmp_path, num_classes=1)
    (image,) = (tmp_path / "train").rglob("*.png")
    shutil.copy(image, image.with_stem("again"))
    options = ("data.name=folder", f"data.root={tmp_path}", f"data.image_size={IMAGE_SIZE}", "data.workers=0")
    recipes = [small_recipe(*options, "data.batch_size=2", f"seed={seed}") for seed in (1, 1, 2)]
    crops = [next(iter(Run(recipe, RunFolder("never made")).train.epoch(1))).images for recipe in recipes]
    assert torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2])
