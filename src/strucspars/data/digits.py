"""Handwritten digits that come with scikit-learn: data for demonstrations and tests, without a download."""

import numpy as np
import torch
from torch.nn import functional

from strucspars.data.image_set import Augmentation, ImageSet, ResidentData

TEST_IMAGES = 450
SPLIT_SEED = 0
BRIGHTEST = 16  # scikit-learn's pixels are whole numbers from 0 to 16


def digits() -> ResidentData:
    """1797 digits of ten classes: 1347 to learn from, 450 to test on, always the same ones, equally mixed.

    The images are not the original 8 x 8 grey ones: they are enlarged to 16 x 16 (bilinear) and repeated in three
    equal channels, so that networks made for CIFAR take them as they are. Training shifts them by a pixel, that is by
    half an original one, and never mirrors them: a mirrored digit is none.

    >>> digits().train.images.shape
    torch.Size([1347, 3, 16, 16])
    """
    pixels, labels = _scikit_learn_digits()
    train, test = _stratified_split(labels)
    scaled = torch.from_numpy(pixels).to(torch.float32)[:, None] * (255 / BRIGHTEST)
    enlarged = functional.interpolate(scaled, scale_factor=2, mode="bilinear", align_corners=False)
    images = enlarged.round().to(torch.uint8).repeat(1, 3, 1, 1)
    targets = torch.from_numpy(labels).to(torch.int64)
    brightness = images[train].to(torch.float64) / 255
    return ResidentData(
        name="digits",
        train=ImageSet(images[train], targets[train]),
        test=ImageSet(images[test], targets[test]),
        num_classes=10,
        mean=(brightness.mean().item(),) * 3,
        std=(brightness.std(correction=0).item(),) * 3,
        augmentation=Augmentation(padding=1, flip=False),
    )


def _scikit_learn_digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the digits come with scikit-learn; pip install scikit-learn") from error
    bunch = load_digits()
    return np.asarray(bunch.images), np.asarray(bunch.target)


def _stratified_split(labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of training and test images, each with its share of every class."""
    from sklearn.model_selection import train_test_split

    # An integer seed means numpy's old generator, whose numbers are promised never to change.
    train, test = train_test_split(
        np.arange(len(labels)), test_size=TEST_IMAGES, random_state=SPLIT_SEED, stratify=labels
    )
    return torch.from_numpy(np.sort(train)), torch.from_numpy(np.sort(test))
