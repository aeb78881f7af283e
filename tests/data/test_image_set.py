from typing import Any

import pytest
import torch

from strucspars.data.image_set import Augmentation, ImageSet, ResidentData


def images(count: int = 4, *shape: int) -> torch.Tensor:
    return torch.zeros(count, *(shape or (3, 8, 8)), dtype=torch.uint8)


def labels(*values: int) -> torch.Tensor:
    return torch.tensor(values or (0, 1, 2, 1))


def data(**changes: Any) -> ResidentData:
    split = ImageSet(images(), labels())
    options = {"name": "toy", "train": split, "test": split, "num_classes": 3, "augmentation": None}
    return ResidentData(**{"mean": (0.5,) * 3, "std": (0.2,) * 3, **options, **changes})


@pytest.mark.parametrize(
    ("some_images", "some_labels", "complaint"),
    [
        (images().float(), labels(), r"float32 \(4, 3, 8, 8\)"),
        (images()[0], labels(), r"uint8 \(3, 8, 8\)"),
        (images(), labels().int(), r"int32 \(4,\)"),
        (images(), labels()[:, None], r"int64 \(4, 1\)"),
        (images(3), labels(), "3 images and 4 labels"),
        (images(0), labels()[:0], "at least one image"),
        (images(4, 3, 0, 8), labels(), "at least one image of one pixel"),
        (images(), labels(0, 1, 2, -1), "-1"),
    ],
)
def test_malformed_images_and_labels_are_refused(
    some_images: torch.Tensor, some_labels: torch.Tensor, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        ImageSet(some_images, some_labels)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_classes": 2}, "toy: a train label is 2, but there are 2 classes"),
        ({"test": ImageSet(images(1), labels(3))}, "toy: a test label is 3"),
        ({"test": ImageSet(images(4, 1, 8, 8), labels())}, r"\(3, 8, 8\).*\(1, 8, 8\)"),
        ({"mean": (0.5,)}, "3 channels"),
        ({"std": (0.2, 0.2)}, "3 channels"),
        ({"std": (0.2, 0.0, 0.2)}, "positive"),
    ],
)
def test_data_that_contradict_themselves_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        data(**changes)


def test_the_image_shape_is_read_off_the_images() -> None:
    assert data().image_shape == (3, 8, 8)


def test_negative_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Augmentation(padding=-1, flip=False)
