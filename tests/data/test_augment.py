import pytest
import torch
from torch.nn import functional

from strucspars.data.image_set import Augmentation, drawn_variations, varied


def image_by_image(images: torch.Tensor, variations: torch.Tensor, padding: int) -> torch.Tensor:
    """The slow way, for comparison."""
    _, _, height, width = images.shape
    results = []
    for image, (top, left, mirrored) in zip(images, variations.tolist(), strict=True):
        crop = functional.pad(image, (padding,) * 4)[:, top : top + height, left : left + width]
        results.append(crop.flip(-1) if mirrored else crop)
    return torch.stack(results)


@pytest.mark.parametrize("padding", [0, 1, 4, 9])
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 7), (2, 1, 1)])
def test_many_images_at_once_equal_one_by_one(padding: int, shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (60, *shape), dtype=torch.uint8, generator=generator)
    variations = drawn_variations(60, Augmentation(padding, flip=True), generator)
    result = varied(images, variations, padding=padding)
    assert result.dtype == torch.uint8
    assert torch.equal(result, image_by_image(images, variations, padding))


def test_all_shifts_are_equally_likely_and_half_are_mirrored() -> None:
    count = 81 * 500
    variations = drawn_variations(count, Augmentation(padding=4, flip=True), torch.Generator().manual_seed(0))
    top, left, mirrored = variations.unbind(1)
    shifts = (top * 9 + left).bincount(minlength=81)
    assert len(shifts) == 81
    # Standard deviation 22; five of them for 81 counts.
    assert (shifts - 500).abs().max() < 110
    assert mirrored.double().mean().item() == pytest.approx(0.5, abs=0.0125)
    shift_if_mirrored = top[mirrored.bool()].double().mean().item()
    assert shift_if_mirrored == pytest.approx(4.0, abs=0.1)


def test_without_flip_nothing_is_mirrored_and_shifts_stay_the_same() -> None:
    plain, flipped = (
        drawn_variations(50, Augmentation(padding=2, flip=flip), torch.Generator().manual_seed(3))
        for flip in (False, True)
    )
    assert not plain[:, 2].any()
    assert torch.equal(plain[:, :2], flipped[:, :2])
