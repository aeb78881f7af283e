import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from strucspars.core.plan import Preprocessing
from strucspars.data.batches import Batch, EpochOrder, FolderBatches
from strucspars.data.folder import FolderSplit

COUNT = 7


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class per image, so that labels tell which image it is."""
    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for number in range(COUNT):
        (root / str(number)).mkdir()
        pixels = torch.randint(0, 256, (12, 12, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(root / str(number) / "image.png")
    return root


def split(root: Path, *, random: bool = True) -> FolderSplit:
    return FolderSplit(root, Preprocessing(size=6, resize=8), random=random, seed=0)


def batches(dataset: FolderSplit, **changes: Any) -> FolderBatches:
    dealt = {name: changes.pop(name) for name in EpochOrder.__dataclass_fields__ if name in changes}
    order = EpochOrder(**{"count": len(dataset), "batch_size": 2, "shuffled": True, "seed": 0, **dealt})
    return FolderBatches(dataset, order, **{"device": torch.device("cpu"), **changes})


def assert_same(ours: Iterable[Batch], theirs: Iterable[Batch]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for name in ("images", "labels", "valid"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_workers_make_no_difference_in_any_epoch(images: Path) -> None:
    dataset = split(images)
    alone, helped = batches(dataset), batches(dataset, workers=2)
    # The workers live on from epoch to epoch, and must not stay in the first.
    for epoch, start_step in ((0, 0), (1, 0), (1, 2), (5, 1)):
        assert_same(helped.epoch(epoch, start_step=start_step), alone.epoch(epoch, start_step=start_step))
    # An epoch left in the middle does not leak into the next.
    next(helped.epoch(6))
    assert_same(helped.epoch(7), alone.epoch(7))


def test_an_epoch_goes_on_where_it_was_left(images: Path) -> None:
    dataset = split(images)
    assert_same(batches(dataset).epoch(3, start_step=2), list(batches(dataset).epoch(3))[2:])


def test_skipped_images_are_not_read(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = split(images)
    whole = torch.cat([batch.labels for batch in batches(dataset).epoch(0)]).tolist()
    read = []
    original = FolderSplit.__getitem__

    def noting(self: FolderSplit, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        read.append(key)
        return original(self, key)

    monkeypatch.setattr(FolderSplit, "__getitem__", noting)
    list(batches(dataset).epoch(0, start_step=2))
    assert read == [(0, index) for index in whole[4:]]


def test_training_shows_every_image_and_fills_up_from_its_beginning(images: Path) -> None:
    training = batches(split(images))
    epoch = list(training.epoch(1))
    labels = torch.cat([batch.labels for batch in epoch])
    assert len(epoch) == training.steps == 4
    assert labels[:COUNT].sort().values.tolist() == list(range(COUNT))
    assert labels[COUNT] == labels[0]
    assert all(batch.valid.all() and batch.images.shape == (2, 3, 6, 6) for batch in epoch)


def test_an_evaluation_shows_every_image_in_order_and_marks_the_filling(images: Path) -> None:
    dataset = split(images, random=False)
    epoch = list(batches(dataset, shuffled=False, batch_size=4).epoch(0))
    assert torch.cat([batch.labels for batch in epoch]).tolist() == [*range(COUNT), 0]
    assert torch.cat([batch.valid for batch in epoch]).tolist() == [True] * COUNT + [False]
    assert torch.equal(epoch[0].images[3], dataset[0, 3][0])


@pytest.mark.parametrize("shuffled", [False, True])
def test_two_processes_see_together_what_one_sees(images: Path, shuffled: bool) -> None:
    dataset = split(images)
    alone = batches(dataset, batch_size=4, shuffled=shuffled)
    ranks = [batches(dataset, batch_size=2, shuffled=shuffled, rank=rank, world_size=2) for rank in (0, 1)]
    for whole, *parts in zip(alone.epoch(1), *(rank.epoch(1) for rank in ranks), strict=True):
        for name in ("images", "labels", "valid"):
            together = torch.stack([getattr(part, name) for part in parts], dim=1).flatten(0, 1)
            assert torch.equal(together, getattr(whole, name))


def test_format_and_precision_are_as_asked(images: Path) -> None:
    batch = next(batches(split(images), memory_format=torch.channels_last, dtype=torch.bfloat16).epoch(0))
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.images.dtype == torch.bfloat16


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_random_state_stays(images: Path, workers: int) -> None:
    training = batches(split(images), workers=workers)
    state = torch.get_rng_state()
    list(training.epoch(0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named_in_one_line_even_by_a_worker(tmp_path: Path, workers: int) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"^cannot read the image .*broken\.jpg.*; replace or remove it$"):
        list(batches(split(tmp_path), workers=workers).epoch(0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_gpu_sees_the_same_images(images: Path) -> None:
    dataset = split(images)
    on_gpu = batches(dataset, device=torch.device("cuda"), workers=1)
    for ours, theirs in zip(on_gpu.epoch(1), batches(dataset).epoch(1), strict=True):
        assert torch.equal(ours.images.cpu(), theirs.images)
        assert torch.equal(ours.labels.cpu(), theirs.labels)


def test_every_epoch_crops_the_images_anew(images: Path) -> None:
    dataset = split(images)
    training = batches(dataset)
    for epoch in (0, 3):
        for batch in training.epoch(epoch):
            for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
                assert torch.equal(image, dataset[epoch, label][0])
    assert any(not torch.equal(dataset[0, label][0], dataset[3, label][0]) for label in range(COUNT))


def test_an_evaluation_that_starts_late_marks_the_filling_of_its_own_steps(images: Path) -> None:
    (last,) = batches(split(images, random=False), shuffled=False, batch_size=4).epoch(0, start_step=1)
    assert last.labels.tolist() == [4, 5, 6, 0]
    assert last.valid.tolist() == [True, True, True, False]


def test_every_part_of_a_batch_is_on_the_device(images: Path) -> None:
    for batch in batches(split(images), device=torch.device("meta")).epoch(0):
        assert {part.device.type for part in (batch.images, batch.labels, batch.valid)} == {"meta"}


class ReaderSplit(FolderSplit):
    """Gives the number of the process that reads an image as its label."""

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        return super().__getitem__(key)[0], os.getpid()


def test_workers_live_from_epoch_to_epoch(images: Path) -> None:
    training = batches(ReaderSplit(images, Preprocessing(size=6, resize=8), random=True, seed=0), workers=1)
    readers = {reader for epoch in (0, 1) for batch in training.epoch(epoch) for reader in batch.labels.tolist()}
    assert len(readers) == 1
    assert os.getpid() not in readers
