import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from strucspars.data.catalogue import digits


def test_digits_are_images_for_cifar_networks() -> None:
    data = digits()
    assert data.image_shape == (3, 16, 16)
    assert data.num_classes == 10
    assert (len(data.train), len(data.test)) == (1347, 450)
    for channel in (1, 2):
        assert torch.equal(data.train.images[:, channel], data.train.images[:, 0])


def test_the_split_is_always_the_same_and_shares_no_image() -> None:
    first, second = digits(), digits()
    assert torch.equal(first.test.images, second.test.images)
    # Accuracies are compared between versions and machines.
    assert first.train.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert first.test.labels[:12].tolist() == [1, 4, 8, 6, 5, 9, 9, 1, 3, 5, 2, 2]
    images = torch.cat([first.train.images, first.test.images])
    # scikit-learn's digits hold no image twice, so one in both splits would be missed here.
    assert len({image.numpy().tobytes() for image in images}) == 1797


def test_every_class_has_its_share_in_both_splits() -> None:
    data = digits()
    shares = data.test.labels.bincount() / (data.test.labels.bincount() + data.train.labels.bincount())
    torch.testing.assert_close(shares, torch.full((10,), 450 / 1797), rtol=0, atol=0.005)


def test_the_pixels_are_those_of_scikit_learn_enlarged() -> None:
    data = digits()
    both = torch.cat([data.train.images, data.test.images])[:, 0].to(torch.float32)
    # The mean of each 2 x 2 block is a smoothed original pixel, so whole images keep about their brightness.
    mine = both.mean(dim=(1, 2)).sort().values
    original = (torch.from_numpy(load_digits().images).float() * 255 / 16).mean(dim=(1, 2)).sort().values
    torch.testing.assert_close(mine, original, rtol=0.03, atol=1.0)
    assert both.max() == 255
    assert both.min() == 0


def test_normalised_training_pixels_have_mean_0_and_deviation_1() -> None:
    data = digits()
    pixels = data.train.images.double() / 255
    normalised = (pixels - data.mean[0]) / data.std[0]
    torch.testing.assert_close(normalised.mean().item(), 0.0, rtol=0, atol=1e-9)
    torch.testing.assert_close(normalised.std(correction=0).item(), 1.0, rtol=0, atol=1e-9)


def test_digits_are_shifted_but_never_mirrored() -> None:
    augmentation = digits().augmentation
    assert augmentation is not None
    assert augmentation.padding == 1
    assert not augmentation.flip


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        digits()


def enlarged(pixels: np.ndarray) -> np.ndarray:
    """Twice as many pixels along the last axis, each three quarters of the nearest one and a quarter of the next."""
    padded = np.concatenate([pixels[..., :1], pixels, pixels[..., -1:]], axis=-1)
    both = 0.75 * pixels + 0.25 * padded[..., :-2], 0.75 * pixels + 0.25 * padded[..., 2:]
    return np.stack(both, axis=-1).reshape(*pixels.shape[:-1], -1)


def test_every_image_is_an_enlarged_digit_with_its_label() -> None:
    bunch = load_digits()
    exact = enlarged(enlarged(bunch.images * 255 / 16).swapaxes(1, 2)).swapaxes(1, 2)
    labels = {
        image.tobytes(): label for image, label in zip(np.rint(exact).astype(np.uint8), bunch.target, strict=True)
    }
    data = digits()
    for images in (data.train, data.test):
        found = [labels[image.numpy().tobytes()] for image in images.images[:, 0]]
        assert found == images.labels.tolist()
