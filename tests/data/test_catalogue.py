from pathlib import Path

import pytest
import torch
from PIL import Image

from strucspars.core.plan import Preprocessing
from strucspars.data import catalogue
from strucspars.data.batches import FolderBatches, ResidentBatches
from strucspars.data.catalogue import DATA_NAMES, batches_of, digits, load_data
from strucspars.data.folder import FolderSplit
from strucspars.models.preprocessing import usual_resize

CPU = torch.device("cpu")


def small_folder(root: Path) -> Path:
    for split in ("train", "val"):
        for number in range(2):
            (root / split / f"class_{number}").mkdir(parents=True)
            Image.new("RGB", (20, 30)).save(root / split / f"class_{number}" / "0.png")
    return root


def test_digits_need_no_root() -> None:
    data = load_data("digits", None)
    assert data.name == "digits"
    assert data.image_shape == (3, 16, 16)


@pytest.mark.parametrize("name", ["imagenet", "folder"])
def test_image_folders_are_read_at_the_asked_size(tmp_path: Path, name: str) -> None:
    data = load_data(name, small_folder(tmp_path), preprocessing=Preprocessing(size=14, resize=16), seed=3)
    assert isinstance(data.train, FolderSplit)
    assert data.name == name
    assert data.image_shape == (3, 14, 14)
    assert data.train.preprocessing.resize == 16
    assert data.train.seed == 3


@pytest.mark.parametrize(("image_size", "resize"), [(224, 256), (32, 37), (1, 1)])
def test_images_are_resized_to_8_sevenths_of_the_crop(tmp_path: Path, image_size: int, resize: int) -> None:
    assert usual_resize(image_size) == resize
    data = load_data("folder", small_folder(tmp_path), preprocessing=Preprocessing(size=image_size, resize=image_size))
    assert isinstance(data.train, FolderSplit)
    assert isinstance(data.test, FolderSplit)
    # Training needs a border to crop from; the evaluation does as it is told.
    assert (data.train.preprocessing.resize, data.test.preprocessing.resize) == (resize, image_size)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_looked_for_under_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no {name.upper()} data under {tmp_path}") as caught:
        load_data(name, tmp_path)
    assert str(caught.value).endswith("or on the command line, download=True in Python)")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown data set 'imagnet'; did you mean 'imagenet'"):
        load_data("imagnet", None)
    with pytest.raises(ValueError, match="unknown data set 'qqq'; there are digits, cifar10"):
        load_data("qqq", None)


@pytest.mark.parametrize("name", [name for name in DATA_NAMES if name != "digits"])
def test_a_missing_root_says_what_it_should_hold(name: str) -> None:
    with pytest.raises(ValueError, match=f"data set '{name}' needs a root: the folder with"):
        load_data(name, None)


def test_an_image_folder_cannot_be_downloaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'imagenet' cannot be downloaded"):
        load_data("imagenet", tmp_path, download=True)


def test_digits_come_as_resident_batches() -> None:
    data = digits()
    training = batches_of(data, training=True, batch_size=64, device=CPU, seed=1, dtype=torch.bfloat16)
    evaluation = batches_of(data, training=False, batch_size=100, device=CPU, memory_format=torch.channels_last)
    assert isinstance(training, ResidentBatches)
    assert isinstance(evaluation, ResidentBatches)
    assert (training.steps, evaluation.steps) == (22, 5)
    assert training.order.shuffled
    assert training.order.seed == 1
    assert training.augmentation == data.augmentation
    assert training.images.dtype == torch.bfloat16
    assert evaluation.augmentation is None
    assert evaluation.images[0].is_contiguous(memory_format=torch.channels_last)
    labels = torch.cat([batch.labels[batch.valid] for batch in evaluation.epoch(0)])
    assert torch.equal(labels, data.test.labels)


def test_image_folders_come_as_folder_batches(tmp_path: Path) -> None:
    data = load_data("folder", small_folder(tmp_path), preprocessing=Preprocessing(size=14, resize=16))
    training = batches_of(data, training=True, batch_size=2, device=CPU, seed=0, workers=0)
    evaluation = batches_of(data, training=False, batch_size=3, device=CPU, workers=0, dtype=torch.float64)
    assert isinstance(training, FolderBatches)
    assert isinstance(evaluation, FolderBatches)
    (batch,) = training.epoch(0)
    assert batch.images.shape == (2, 3, 14, 14)
    (batch,) = evaluation.epoch(0)
    assert batch.valid.tolist() == [True, True, False]
    assert batch.images.dtype == torch.float64


def test_a_folders_evaluation_shows_its_test_images(tmp_path: Path) -> None:
    small_folder(tmp_path)
    for number in range(2):
        Image.new("RGB", (20, 30), "white").save(tmp_path / "val" / f"class_{number}" / "0.png")
    data = load_data("folder", tmp_path, preprocessing=Preprocessing(size=14, resize=16))
    for training in (True, False):
        (batch,) = batches_of(data, training=training, batch_size=2, device=CPU).epoch(0)
        assert bool((batch.images > 0).all()) is not training


def test_several_processes_share_the_batches() -> None:
    shares = [
        batches_of(digits(), training=True, batch_size=32, device=CPU, seed=1, rank=rank, world_size=2).steps
        for rank in (0, 1)
    ]
    assert shares == [22, 22]


def numbered_folder(root: Path, count: int) -> Path:
    """A class per image, so that labels tell which image it is."""
    for split in ("train", "val"):
        for number in range(count):
            (root / split / f"class_{number}").mkdir(parents=True)
            Image.new("RGB", (20, 30)).save(root / split / f"class_{number}" / "0.png")
    return root


def test_several_processes_share_the_images_of_a_folder(tmp_path: Path) -> None:
    data = load_data("folder", numbered_folder(tmp_path, 8), preprocessing=Preprocessing(size=14, resize=16))
    for training in (True, False):
        seen = [
            label
            for rank in (0, 1)
            for batch in batches_of(data, training=training, batch_size=2, device=CPU, rank=rank, world_size=2).epoch(1)
            for label in batch.labels.tolist()
        ]
        assert sorted(seen) == list(range(8))


def test_the_order_of_a_folders_images_depends_on_the_seed(tmp_path: Path) -> None:
    data = load_data("folder", numbered_folder(tmp_path, 8), preprocessing=Preprocessing(size=14, resize=16))
    orders = [
        torch.cat([b.labels for b in batches_of(data, training=True, batch_size=4, device=CPU, seed=seed).epoch(0)])
        for seed in (1, 1, 2)
    ]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_a_folder_is_read_by_as_many_workers_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr(catalogue, "FolderBatches", lambda images, order, **options: asked.update(options))
    data = load_data("folder", small_folder(tmp_path), preprocessing=Preprocessing(size=14, resize=16))
    batches_of(data, training=True, batch_size=2, device=CPU, workers=3)
    assert asked["workers"] == 3


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("download", [False, True])
def test_a_download_is_made_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, download: bool
) -> None:
    asked: list[tuple[Path, str, bool]] = []
    monkeypatch.setattr(
        catalogue, "read_cifar", lambda root, layout, *, download: asked.append((root, layout.name, download))
    )
    load_data(name, tmp_path, download=download)
    assert asked == [(tmp_path, name, download)]
