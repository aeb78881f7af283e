import io
import json
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from strucspars.train.observer import LARGEST_SIDE, _picture
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.rules import PICTURED_LAYERS
from strucspars.train.run import RunInterrupted
from strucspars.train.run_folder import RunFolder


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events: Any = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_events_hold_the_metrics_once_also_of_a_run_that_was_stopped(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    for questions in (9, 8):
        answers = chain(repeat(False, questions), repeat(True))
        with pytest.raises(RunInterrupted):
            run_pipeline(small_recipe(), tmp_path / "run", should_stop=answers.__next__)
    run_pipeline(small_recipe(), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    written = scalars(folder.tensorboard)
    for number, row in enumerate(folder.metrics(), start=1):
        for key in ("test_top1", "test_loss"):
            values = dict(written[f"{row['stage']}/{key}"])
            assert values[number] == pytest.approx(row[key], rel=1e-6)
    assert [step for step, _ in written["finetune/test_top1"]] == [4, 5]


def test_pictures_of_some_layers_show_their_matrices_in_the_present_orders(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    run_pipeline(small_recipe(), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    events: Any = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    layers = json.loads((folder.path / "layers.json").read_text())
    shapes = {layer["name"]: layer["weight_shape"][:2] for layer in layers}
    pictured = {tag.removeprefix("importance/"): events.Images(tag) for tag in events.Tags()["images"]}
    assert len(pictured) == min(PICTURED_LAYERS, len(layers))
    for layer, (picture,) in pictured.items():
        assert picture.step == 1
        pixels = np.asarray(Image.open(io.BytesIO(picture.encoded_image_string)))
        assert list(pixels.shape[:2]) == shapes[layer]
        assert pixels.max() == 255


@pytest.mark.parametrize("shape", [(3, 5), (200, 64), (130, 1000)])
def test_a_picture_is_made_of_the_means_of_blocks(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).random(shape)
    picture = _picture(matrix)
    assert picture.shape == tuple(min(side, LARGEST_SIDE) for side in shape)
    if shape == picture.shape:
        np.testing.assert_array_equal(picture, np.round(255 * matrix / matrix.max()))
    assert picture.max() == 255
    assert _picture(np.zeros(shape)).max() == 0
