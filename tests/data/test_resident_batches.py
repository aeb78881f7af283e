from typing import Any
from unittest.mock import Mock

import pytest
import torch

from strucspars.data import batches as batches_module
from strucspars.data.batches import Batch, EpochOrder, ResidentBatches
from strucspars.data.image_set import Augmentation, ImageSet, Stream, drawn_variations, generator_for, varied

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
CPU = torch.device("cpu")


def split(count: int = 10) -> ImageSet:
    """Random images whose labels are their numbers."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (count, 3, 6, 5), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.arange(count))


def batches(**changes: Any) -> ResidentBatches:
    images = changes.pop("split", None) or split()
    dealt = {name: changes.pop(name) for name in EpochOrder.__dataclass_fields__ if name in changes}
    order = EpochOrder(**{"count": len(images), "batch_size": 4, "shuffled": True, "seed": 0, **dealt})
    return ResidentBatches(images, order, **{"mean": MEAN, "std": STD, "device": CPU, **changes})


def normalised(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def copied(epoch: Any) -> list[Batch]:
    return [Batch(batch.images.clone(), batch.labels.clone(), batch.valid.clone()) for batch in epoch]


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in ("images", "labels", "valid"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_an_evaluation_has_every_image_in_order_and_marks_the_filling() -> None:
    evaluation = batches(shuffled=False)
    assert evaluation.steps == 3
    images = torch.cat([batch.images for batch in evaluation.epoch(0)])
    labels = torch.cat([batch.labels for batch in evaluation.epoch(0)])
    valid = torch.cat([batch.valid for batch in evaluation.epoch(0)])
    assert labels.tolist() == [*range(10), 0, 0]
    assert valid.tolist() == [True] * 10 + [False] * 2
    torch.testing.assert_close(images, normalised(split().images[labels]))


def test_a_training_epoch_has_every_image_and_fills_up_from_its_beginning() -> None:
    epoch = copied(batches().epoch(3))
    labels = torch.cat([batch.labels for batch in epoch])
    assert labels[:10].sort().values.tolist() == list(range(10))
    assert labels[:10].tolist() != list(range(10))
    assert torch.equal(labels[10:], labels[:2])
    assert all(batch.valid.all() for batch in epoch)
    for batch in epoch:
        torch.testing.assert_close(batch.images, normalised(split().images[batch.labels]))


def test_a_batch_larger_than_the_split_repeats_it() -> None:
    (batch,) = batches(batch_size=25).epoch(0)
    assert torch.equal(batch.labels[10:20], batch.labels[:10])
    assert torch.equal(batch.labels[20:], batch.labels[:5])
    assert batch.images.shape == (25, 3, 6, 5)


AUGMENTATION = Augmentation(padding=1, flip=True)


def shifted(image: torch.Tensor) -> list[torch.Tensor]:
    """Every image that padding of 1 and a mirror can make."""
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
    crops = [padded[:, top : top + 6, left : left + 5] for top in range(3) for left in range(3)]
    return [normalised(crop) for crop in (*crops, *(crop.flip(-1) for crop in crops))]


def test_augmented_images_are_shifts_and_mirrors_of_the_right_image() -> None:
    training = batches(augmentation=AUGMENTATION)
    seen = set()
    for epoch in range(30):
        for batch in training.epoch(epoch):
            for image, label in zip(batch.images, batch.labels, strict=True):
                choices = shifted(split().images[label])
                (which,) = (n for n, choice in enumerate(choices) if torch.allclose(choice, image, atol=1e-5))
                seen.add(which)
    assert seen == set(range(18))


@pytest.mark.parametrize("augmentation", [None, AUGMENTATION])
@pytest.mark.parametrize("shuffled", [False, True])
def test_two_processes_see_together_what_one_sees(shuffled: bool, augmentation: Augmentation | None) -> None:
    options = {"split": split(11), "shuffled": shuffled, "augmentation": augmentation}
    alone = copied(batches(**options, batch_size=4).epoch(2))
    ranks = [copied(batches(**options, batch_size=2, rank=rank, world_size=2).epoch(2)) for rank in (0, 1)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        for name in ("images", "labels", "valid"):
            together = torch.stack([getattr(part, name) for part in parts], dim=1).flatten(0, 1)
            assert torch.equal(together, getattr(whole, name))


def test_an_epoch_is_the_same_whatever_was_seen_before() -> None:
    walked, jumped = batches(augmentation=AUGMENTATION), batches(augmentation=AUGMENTATION)
    torch.manual_seed(1)
    epochs = [copied(walked.epoch(epoch)) for epoch in range(3)]
    torch.manual_seed(2)
    assert_same(copied(jumped.epoch(2, start_step=1)), epochs[2][1:])
    assert_same(copied(walked.epoch(0)), epochs[0])
    assert not torch.equal(epochs[0][0].images, epochs[1][0].images)
    assert not torch.equal(epochs[0][0].images, copied(batches(augmentation=AUGMENTATION, seed=1).epoch(0))[0].images)


def test_an_epoch_can_end_where_it_starts() -> None:
    assert list(batches().epoch(0, start_step=3)) == []


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_every_epoch_lies_in_the_same_memory_in_the_wanted_format(memory_format: torch.memory_format) -> None:
    training = batches(memory_format=memory_format, augmentation=AUGMENTATION)
    expected = batches(augmentation=AUGMENTATION)
    addresses = set()
    for epoch in range(2):
        for batch in training.epoch(epoch):
            assert batch.images.is_contiguous(memory_format=memory_format)
        assert_same(copied(training.epoch(epoch)), copied(expected.epoch(epoch)))
        addresses.add((training.images.data_ptr(), training.labels.data_ptr(), training.valid.data_ptr()))
    assert len(addresses) == 1
    assert training.images.shape == (3, 4, 3, 6, 5)


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = copied(batches(augmentation=AUGMENTATION).epoch(0))
    monkeypatch.setattr(batches_module, "IMAGES_PER_PIECE", 5)
    pieced = batches(augmentation=AUGMENTATION)
    # New memory may be that of the buffers before, with the right images in it.
    pieced.images.fill_(torch.nan)
    assert_same(copied(pieced.epoch(0)), whole)


def test_an_evaluation_is_filled_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = batches(shuffled=False)
    evaluation.fill_(0)
    evaluation.images.zero_()
    evaluation.fill_(1)
    assert not evaluation.images.any()
    for changing in (batches(), batches(shuffled=False, augmentation=AUGMENTATION)):
        changing.fill_(0)
        changing.images.zero_()
        changing.fill_(0)
        assert not changing.images.any()
        changing.fill_(1)
        assert changing.images.any()


def test_who_was_interrupted_while_filling_fills_in_again(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = batches(augmentation=AUGMENTATION)
    expected = copied(interrupted.epoch(0))
    with monkeypatch.context() as patch:
        patch.setattr(batches_module, "varied", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            interrupted.fill_(1)
    assert_same(copied(interrupted.epoch(0)), expected)


def test_lower_precision_rounds_the_same_images() -> None:
    for ours, theirs in zip(batches(dtype=torch.bfloat16).epoch(0), batches().epoch(0), strict=True):
        assert ours.images.dtype == torch.bfloat16
        assert torch.equal(ours.images, theirs.images.to(torch.bfloat16))


def test_the_split_itself_stays_as_it_was() -> None:
    images = split()
    batches(split=images, augmentation=AUGMENTATION).fill_(0)
    assert torch.equal(images.images, split().images)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_gpu_sees_the_same_images(memory_format: torch.memory_format) -> None:
    options = {"augmentation": AUGMENTATION, "memory_format": memory_format}
    on_gpu = batches(device=torch.device("cuda"), **options)
    for epoch in range(2):
        for ours, theirs in zip(on_gpu.epoch(epoch), batches(**options).epoch(epoch), strict=True):
            assert torch.equal(ours.images.cpu(), theirs.images)
            assert torch.equal(ours.labels.cpu(), theirs.labels)


def test_order_and_variations_are_drawn_from_streams_of_their_own() -> None:
    training = batches(augmentation=AUGMENTATION, seed=5)
    drawn = {
        stream: drawn_variations(training.order.places, AUGMENTATION, generator_for(stream, 5, 2))
        for stream in (Stream.CROPS, Stream.ORDER)
    }
    order = torch.randperm(10, generator=generator_for(Stream.ORDER, 5, 2))
    images = split().images[order[torch.arange(training.order.places) % 10]]
    seen = torch.cat([batch.images for batch in training.epoch(2)])
    expected, correlated = (normalised(varied(images, each, padding=1)) for each in drawn.values())
    torch.testing.assert_close(seen, expected)
    assert not torch.allclose(seen, correlated, atol=1e-5)
