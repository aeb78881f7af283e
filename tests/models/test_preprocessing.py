"""What the images of a network go through, by its own metadata."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import strucspars as ss
from strucspars.core.plan import GroupingPlan, Preprocessing
from strucspars.models.preprocessing import preprocessing_of


@pytest.mark.parametrize(
    ("name", "weights", "expected"),
    [
        ("resnet50", None, Preprocessing()),
        ("resnet50", "mine.pt", Preprocessing()),
        ("resnet50", "DEFAULT", Preprocessing(resize=232)),
        ("inception_v3", "mine.pt", Preprocessing(size=299, resize=342)),
        ("my_package.networks:build", "mine.pt", Preprocessing()),
        ("preact-resnet20", None, Preprocessing(size=32, resize=37)),
    ],
)
def test_library_networks_have_the_preprocessing_of_their_weights(
    name: str, weights: str | None, expected: Preprocessing
) -> None:
    assert preprocessing_of(name, weights) == expected


def test_networks_of_timm_have_that_of_their_configuration() -> None:
    half = (0.5, 0.5, 0.5)
    expected = Preprocessing(mean=half, std=half, size=224, resize=256, interpolation="bicubic")
    assert preprocessing_of("timm:tf_efficientnet_lite0") == expected


def test_a_saved_network_brings_its_own(tmp_path: Path) -> None:
    own = Preprocessing(mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0), size=40, resize=None)
    model = nn.Sequential(nn.Conv2d(4, 8, 3))
    ss.save(model, tmp_path / "own.safetensors", plan=replace(ss.model_plan(model), preprocessing=own))
    assert preprocessing_of("resnet50", str(tmp_path / "own.safetensors")) == own
    ss.save(model, tmp_path / "plain.safetensors")
    assert preprocessing_of("resnet50", str(tmp_path / "plain.safetensors")) == Preprocessing()


def test_a_plan_keeps_it_and_is_written_without_it_where_there_is_none() -> None:
    plan = GroupingPlan({}, preprocessing=Preprocessing(size=64, resize=73, interpolation="bicubic"))
    assert GroupingPlan.from_json(plan.to_json()) == plan
    assert "preprocessing" not in GroupingPlan({}).to_json()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"std": (0.2, 0.0, 0.2)}, "std above 0"),
        ({"mean": (0.5,)}, "one number per channel"),
        ({"size": 257}, r"size must be in 1 .. resize \(256\), got 257"),
    ],
)
def test_impossible_ones_are_refused(options: dict[str, tuple[float, ...] | int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(Preprocessing(), **options)  # type: ignore[arg-type]  # values of several types
