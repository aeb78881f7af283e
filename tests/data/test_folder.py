import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from torchvision.transforms import functional

from strucspars.core.plan import Preprocessing
from strucspars.data.folder import FolderData, FolderSplit, calibration_images, image_folder, in_8_bits


def write_image(path: Path, number: int, size: tuple[int, int] = (20, 14)) -> None:
    """A picture without symmetry, so that every crop and mirror of it is different."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=generator)
    Image.fromarray(pixels.numpy()).save(path)


SMALL = Preprocessing(size=8, resize=10)


def write_set(root: Path, *, splits: tuple[str, ...] = ("train", "val"), per_class: int = 3) -> Path:
    for split_number, split in enumerate(splits):
        for number in range(2 * per_class):
            write_image(root / split / f"class_{number % 2}" / f"{number}.png", 100 * split_number + number)
    return root


def folder(root: Path, *, seed: int = 0) -> FolderData:
    return image_folder(root, SMALL, seed=seed)


def normalised(image: Image.Image) -> torch.Tensor:
    result: torch.Tensor = functional.normalize(functional.to_tensor(image), SMALL.mean, SMALL.std)
    return result


def all_crops(path: Path) -> dict[tuple[int, int, bool], torch.Tensor]:
    """Every crop and mirror that training may see of an image of 20 x 14, made with PIL alone."""
    resized = Image.open(path).convert("RGB").resize((14, 10), Image.Resampling.BILINEAR)
    return {
        (top, left, mirrored): normalised(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else crop)
        for top in range(3)
        for left in range(7)
        for mirrored in (False, True)
        for crop in [resized.crop((left, top, left + 8, top + 8))]
    }


@pytest.mark.parametrize("test_folder", ["val", "test"])
def test_both_splits_and_their_classes_are_found(tmp_path: Path, test_folder: str) -> None:
    data = folder(write_set(tmp_path, splits=("train", test_folder)))
    assert (data.num_classes, data.image_shape) == (2, (3, 8, 8))
    assert data.classes == ("class_0", "class_1")
    assert (len(data.train), len(data.test)) == (6, 6)
    assert [data.train[0, index][1] for index in range(6)] == [0, 0, 0, 1, 1, 1]


def test_val_is_preferred_to_a_test_folder_beside_it(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "test").mkdir()
    assert len(folder(tmp_path).test) == 6


def test_training_sees_every_crop_and_mirror_and_nothing_else(tmp_path: Path) -> None:
    train = folder(write_set(tmp_path, per_class=1)).train
    crops = all_crops(tmp_path / "train" / "class_0" / "0.png")
    seen = dict.fromkeys(crops, 0)
    for epoch in range(500):
        image, _ = train[epoch, 0]
        (place,) = (place for place, crop in crops.items() if torch.allclose(crop, image, atol=1e-5))
        seen[place] += 1
    assert min(seen.values()) > 0
    assert 200 < sum(count for (_, _, mirrored), count in seen.items() if mirrored) < 300


def test_evaluation_sees_the_centre_in_every_epoch(tmp_path: Path) -> None:
    test = folder(write_set(tmp_path)).test
    centre = all_crops(tmp_path / "val" / "class_0" / "0.png")[1, 3, False]
    for epoch in (0, 1):
        torch.testing.assert_close(test[epoch, 0][0], centre)


def test_a_sample_depends_on_seed_epoch_and_index_alone(tmp_path: Path) -> None:
    write_set(tmp_path)
    first, second, other_seed = folder(tmp_path).train, folder(tmp_path).train, folder(tmp_path, seed=1).train
    keys = [(epoch, index) for epoch in range(4) for index in range(6)]
    torch.manual_seed(1)
    samples = {key: first[key][0] for key in keys}
    torch.manual_seed(2)
    for key in reversed(keys):
        assert torch.equal(second[key][0], samples[key])
    assert any(not torch.equal(other_seed[key][0], samples[key]) for key in keys)
    assert any(not torch.equal(samples[0, index], samples[1, index]) for index in range(6))


def test_reading_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    train = folder(write_set(tmp_path)).train
    state = torch.get_rng_state()
    train[0, 0]
    assert torch.equal(torch.get_rng_state(), state)


def test_the_paper_s_sizes_are_the_defaults(tmp_path: Path) -> None:
    data = image_folder(write_set(tmp_path, per_class=1))
    assert data.image_shape == (3, 224, 224)
    assert isinstance(data.train, FolderSplit)
    assert data.train.preprocessing.resize == 256
    assert data.train[0, 0][0].shape == (3, 224, 224)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_grey_and_transparent_images_become_coloured_ones(tmp_path: Path, mode: str) -> None:
    write_set(tmp_path)
    Image.new(mode, (9, 30)).save(tmp_path / "train" / "class_0" / "0.png")
    assert folder(tmp_path).train[0, 0][0].shape == (3, 8, 8)


def write_grey(path: Path, pixels: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pgm":  # which older versions of Pillow read, but do not write
        path.write_bytes(b"P5 %d %d 65535\n" % pixels.shape[::-1] + pixels.astype(">u2").tobytes())
    else:
        Image.fromarray(pixels.astype(">u2") if path.stem == "big_endian" else pixels).save(path)


@pytest.mark.parametrize("name", ["0.png", "0.tif", "big_endian.tif", "0.pgm"])
def test_a_16_bit_image_is_the_picture_that_its_8_bit_version_is(tmp_path: Path, name: str) -> None:
    shallow = np.arange(10 * 14).reshape(10, 14)
    noise = np.random.default_rng(0).integers(-128, 129, shallow.shape)
    deep = np.clip(257 * shallow + noise, 0, 65535)
    for split in ("train", "val"):
        write_grey(tmp_path / split / "class_0" / "0.png", shallow.astype(np.uint8))
        write_grey(tmp_path / split / "class_1" / name, deep.astype(np.uint16))
    test = folder(tmp_path).test
    assert torch.equal(test[0, 0][0], test[0, 1][0])


def test_a_16_bit_png_is_scaled_whatever_mode_pillow_gives_it(tmp_path: Path) -> None:
    pixels = np.array([[0, 300, 65535]], dtype=np.uint16)
    Image.fromarray(pixels).save(tmp_path / "0.png")
    with Image.open(tmp_path / "0.png") as image:
        as_numbers = Image.fromarray(pixels.astype(np.int32))
        as_numbers.format = image.format
    assert as_numbers.mode == "I"
    assert np.asarray(in_8_bits(as_numbers)).tolist() == [[0, 1, 255]]


@pytest.mark.parametrize(("dtype", "mode"), [(np.int32, "I"), (np.float32, "F")])
def test_an_image_whose_pixels_have_no_fixed_range_is_refused_by_name(
    tmp_path: Path, dtype: type[np.generic], mode: str
) -> None:
    write_set(tmp_path)
    Image.fromarray(np.ones((12, 12), dtype=dtype)).save(tmp_path / "train" / "class_0" / "0.tif")
    (tmp_path / "train" / "class_0" / "0.png").unlink()
    complaint = rf"class_0/0\.tif: .*mode {mode}\) have no fixed range; convert them to 8 or 16 bit"
    with pytest.raises(ValueError, match=complaint):
        folder(tmp_path).train[0, 0]


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "removed"])
def test_a_broken_image_is_named(tmp_path: Path, damage: str) -> None:
    write_set(tmp_path)
    path = tmp_path / "train" / "class_0" / "0.png"
    train = folder(tmp_path).train
    contents = {"truncated": path.read_bytes()[:200], "empty": b"", "text": b"no image"}
    path.unlink()
    if damage in contents:
        path.write_bytes(contents[damage])
    with pytest.raises(ValueError, match=r"cannot read the image .*class_0/0\.png: .*; replace or remove it"):
        train[0, 0]


def test_missing_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"looked for .*/train and for .*/val or .*/test"):
        folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="looked for"):
        folder(write_set(tmp_path / "trained", splits=("train",)))
    with pytest.raises(FileNotFoundError, match="looked for"):
        folder(write_set(tmp_path / "evaluated", splits=("val",)))


def test_empty_folders_and_classes_are_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "val" / "class_9").mkdir()
    with pytest.raises(FileNotFoundError, match=r"val must hold a folder of images for every class: .*class_9"):
        folder(tmp_path)
    for split in ("train", "val"):
        (tmp_path / "bare" / split).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="bare/train must hold a folder of images for every class"):
        folder(tmp_path / "bare")


def test_splits_with_different_classes_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    write_image(tmp_path / "train" / "cat" / "0.png", 0)
    write_image(tmp_path / "val" / "dog" / "0.png", 0)
    with pytest.raises(ValueError, match=r"only the first has \['cat'\], only the second \['dog'\]"):
        folder(tmp_path)


def test_a_class_that_training_lacks_is_named(tmp_path: Path) -> None:
    write_image(write_set(tmp_path) / "val" / "dog" / "0.png", 0)
    with pytest.raises(ValueError, match=r"only the first has \[\], only the second \['dog'\]"):
        folder(tmp_path)


@pytest.mark.parametrize("image_size", [0, 11])
def test_a_crop_that_does_not_fit_is_refused(tmp_path: Path, image_size: int) -> None:
    with pytest.raises(ValueError, match=rf"1 \.\. resize \(10\), got {image_size}"):
        image_folder(write_set(tmp_path), Preprocessing(size=image_size, resize=10))


def test_pixels_are_normalised_by_the_statistics_of_imagenet(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "class").mkdir(parents=True)
        Image.new("RGB", (12, 12), (255, 0, 51)).save(tmp_path / split / "class" / "0.png")
    pixels, _ = folder(tmp_path).test[0, 0]
    # Those that pretrained networks expect.
    expected = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225])
    torch.testing.assert_close(pixels, expected.view(3, 1, 1).expand(3, 8, 8), rtol=1e-5, atol=1e-5)


def test_images_may_be_taken_whole(tmp_path: Path) -> None:
    write_image(tmp_path / "train" / "class" / "0.png", 0, size=(10, 10))
    write_image(tmp_path / "val" / "class" / "0.png", 1, size=(10, 10))
    data = image_folder(tmp_path, Preprocessing(size=10, resize=10))
    assert torch.equal(data.test[0, 0][0], normalised(Image.open(tmp_path / "val" / "class" / "0.png")))


def test_a_data_set_in_the_present_folder_has_that_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_set(tmp_path / "birds", per_class=1))
    assert folder(Path()).name == "birds"


def test_an_image_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    write_set(tmp_path, per_class=1)
    path = tmp_path / "train" / "class_0" / "0.png"
    expected, _ = folder(tmp_path).train[0, 0]
    path.rename(path.with_name(os.fsdecode(b"caf\xe9.png")))
    assert torch.equal(folder(tmp_path).train[0, 0][0], expected)


def test_a_file_of_another_format_than_those_of_images_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments: started.append(arguments))
    data = folder(write_set(tmp_path))
    path = tmp_path / "train" / "class_0" / "0.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n%%EOF\n")
    with pytest.raises(ValueError, match=r"cannot read the image .*class_0/0\.png: cannot identify"):
        data.train[0, 0]
    assert not started
    with Image.open(path) as image, contextlib.suppress(Exception):
        image.load()
    assert started, "the file would not start it"


def test_a_named_pipe_in_place_of_an_image_hangs_nothing(tmp_path: Path) -> None:
    data = folder(write_set(tmp_path))
    path = tmp_path / "train" / "class_0" / "0.png"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"class_0/0\.png: it is a pipe, .*; give a regular file; replace or remove"):
        data.train[0, 0]


def numbered(root: Path, names: tuple[str, ...]) -> Path:
    for place, name in enumerate(names):
        write_image(root / name / "0.png", place)
    return root


def labels(root: Path, num_classes: int | None) -> list[int]:
    split = FolderSplit(root, SMALL, random=False, seed=0, num_classes=num_classes)
    return [split[0, index][1] for index in range(len(split))]


def test_folders_named_by_numbers_are_outputs_of_a_network_whose_classes_are_known(tmp_path: Path) -> None:
    root = numbered(tmp_path, ("0", "217", "11"))
    assert sorted(labels(root, 1000)) == [0, 11, 217]
    assert labels(root, None) == [0, 1, 2]


def test_folders_that_do_not_fit_the_outputs_are_refused(tmp_path: Path) -> None:
    root = numbered(tmp_path, ("cat", "dog"))
    assert labels(root, 2) == [0, 1]
    with pytest.raises(ValueError, match=r"2 folders of classes \(cat, dog, ...\), but the network has 10 outputs"):
        labels(root, 10)
    with pytest.raises(ValueError, match="has 3 outputs"):
        labels(numbered(tmp_path / "far", ("0", "7")), 3)


def test_calibration_images_are_found_at_any_depth_and_drawn_by_the_seed(tmp_path: Path) -> None:
    root = write_set(tmp_path)
    every = calibration_images(root, SMALL, count=100)
    assert every.shape == (6, 3, 8, 8)  # train/ only
    split = FolderSplit(root / "train", SMALL, random=False, seed=0)
    assert torch.equal(every, torch.stack([split[0, index][0] for index in range(6)]))
    assert torch.equal(calibration_images(root / "train" / "class_0", SMALL, count=100), every[:3])
    draws = [calibration_images(root, SMALL, count=2, seed=seed) for seed in (0, 0, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not all(torch.equal(draws[0], other) for other in draws[2:])


def test_calibration_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        calibration_images(tmp_path / "nowhere", SMALL, count=4)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match="holds no image"):
        calibration_images(tmp_path, SMALL, count=4)
    (tmp_path / "broken.png").write_text("text")
    with pytest.raises(ValueError, match=r"cannot read the image .*broken\.png"):
        calibration_images(tmp_path, SMALL, count=4)
