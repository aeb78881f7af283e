"""Whether GoogLeNet and Inception transform their inputs is not in their state, and survives saving all the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import strucspars as ss
from strucspars.export.storage import TRANSFORM_KEY

IMAGES = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def googlenet(*, transform_input: bool) -> Any:
    return torchvision.models.googlenet(
        num_classes=5, aux_logits=False, init_weights=False, transform_input=transform_input
    ).eval()


def compressed(*, transform_input: bool) -> Any:
    model = googlenet(transform_input=transform_input)
    rules = ss.SparsifyConfig(target=0.01, include=("inception3a.*",))
    return ss.convert_(model, ss.one_shot_plan(model, rules))


def scores(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model.eval()(IMAGES)
    return output


@pytest.mark.parametrize("transforms", [True, False])
@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential, nn.DataParallel])
def test_a_loaded_network_transforms_its_inputs_as_the_saved_one_did(
    tmp_path: Path, transforms: bool, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    saved, fresh = compressed(transform_input=transforms), googlenet(transform_input=not transforms)
    ss.save(wrap(saved), tmp_path / "small.safetensors")
    ss.load(tmp_path / "small.safetensors", wrap(fresh))
    assert fresh.transform_input is transforms
    assert torch.equal(scores(fresh), scores(saved))


def test_inception_transforms_its_inputs_after_loading_too(tmp_path: Path) -> None:
    options = {"num_classes": 5, "aux_logits": False, "init_weights": False}
    ss.save(torchvision.models.inception_v3(**options, transform_input=True), tmp_path / "dense.safetensors")
    restored = ss.load(tmp_path / "dense.safetensors", torchvision.models.inception_v3(**options))
    assert restored.transform_input is True


@pytest.mark.parametrize("transforms", [True, False])
def test_a_subclass_transforms_its_inputs_after_loading_as_before(tmp_path: Path, transforms: bool) -> None:
    class Own(torchvision.models.GoogLeNet):  # type: ignore[misc]  # torchvision has no types
        pass

    def own(*, transform_input: bool) -> Own:
        return Own(num_classes=5, aux_logits=False, init_weights=False, transform_input=transform_input)

    ss.save(own(transform_input=transforms), tmp_path / "own.safetensors")
    restored = ss.load(tmp_path / "own.safetensors", own(transform_input=not transforms))
    assert restored.transform_input is transforms


def test_files_of_other_networks_say_nothing_of_inputs(tmp_path: Path) -> None:
    ss.save(nn.Conv2d(2, 2, 1), tmp_path / "layer.safetensors")
    with safe_open(tmp_path / "layer.safetensors", framework="pt") as file:
        assert TRANSFORM_KEY not in file.metadata()


def with_metadata(path: Path, text: str) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, metadata | {TRANSFORM_KEY: text})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", r"strucspars\.transform_input: is not valid JSON"),
        ("[" * 100_000, r"strucspars\.transform_input: is not valid JSON"),
        ("[true]", r"strucspars\.transform_input: must be a mapping, got \[True\]"),
        ('{"": 1}', "must be true or false, got 1"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_model_stays_as_it_was(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "layer.safetensors"
    ss.save(nn.Conv2d(2, 2, 1), path)
    with_metadata(path, text)
    model = nn.Conv2d(2, 2, 1)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=complaint):
        ss.load(path, model)
    assert torch.equal(model.weight, before)


def test_a_network_that_cannot_transform_its_inputs_loads_what_was_saved_without(tmp_path: Path) -> None:
    path, saved = tmp_path / "layer.safetensors", nn.Conv2d(2, 2, 1)
    ss.save(saved, path)
    with_metadata(path, '{"": false, "backbone": false}')
    assert torch.equal(ss.load(path, nn.Conv2d(2, 2, 1)).weight, saved.weight)


def test_a_network_that_transforms_its_inputs_is_folded() -> None:
    model = compressed(transform_input=True)
    folded = ss.fold(model, IMAGES)
    assert ss.fold_report(folded).untraced_reason == ""
    with torch.no_grad():
        torch.testing.assert_close(folded(IMAGES), model(IMAGES), rtol=1e-3, atol=1e-4)
