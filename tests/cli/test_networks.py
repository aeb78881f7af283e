"""What commands read back computes what was saved, whatever its head, and whether GoogLeNet transforms its inputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import strucspars as ss
from strucspars.cli.networks import data_image_shape, find_target, usual_classes
from strucspars.core.plan import GroupingPlan
from strucspars.models.catalogue import build_model
from strucspars.train.recipe import DataRecipe
from strucspars.train.run_folder import RunFolder

IMAGES = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def read(path: Path, name: str) -> nn.Module:
    return find_target(str(path), model=name, image_shape=(3, 64, 64)).network()


def scores(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model.eval()(IMAGES)
    return output


def stored_googlenet() -> dict[str, torch.Tensor]:
    """With statistics of its own: without, a fresh network's scores say next to nothing about its inputs."""
    torch.manual_seed(0)
    model = torchvision.models.googlenet(aux_logits=True, init_weights=False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model(torch.randn(4, 3, 64, 64))
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize("transforms", [True, False])
def test_a_file_is_read_as_the_network_that_was_saved(tmp_path: Path, transforms: bool) -> None:
    saved = torchvision.models.googlenet(
        num_classes=5, aux_logits=False, init_weights=False, transform_input=transforms
    )
    ss.save(saved, tmp_path / "net.safetensors")
    assert torch.equal(scores(read(tmp_path / "net.safetensors", "googlenet")), scores(saved))


def test_a_folder_of_torchvisions_weights_holds_the_network_that_torchvision_builds(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = stored_googlenet()
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda *_, **__: stored)
    options = ("--model", "googlenet", "--image-shape", "3x64x64", "--target", "0.1", "--run", "runs/first")
    assert call("compress", "DEFAULT", *options).status == 0
    folder = RunFolder(Path("runs/first"))
    expected = torchvision.models.googlenet(weights="DEFAULT")
    ss.convert_(expected, GroupingPlan.from_json(folder.plan_path.read_text()))
    found = find_target("runs/first", model=None).network()
    torch.testing.assert_close(scores(found), scores(expected))
    expected.transform_input = False
    assert (scores(found) - scores(expected)).abs().max() > 0.01


@pytest.mark.parametrize(("name", "classes"), [("preact-resnet20", 10), ("cifar-resnet8", 10), ("resnet50", 1000)])
def test_a_network_by_name_has_the_classes_of_its_data(name: str, classes: int) -> None:
    assert usual_classes(name) == classes


@pytest.mark.parametrize(
    ("name", "shape"),
    [("digits", (3, 16, 16)), ("cifar10", (3, 32, 32)), ("cifar100", (3, 32, 32)), ("folder", (3, 48, 48))],
)
def test_the_shape_of_a_runs_images_is_known_without_them(name: str, shape: tuple[int, int, int]) -> None:
    assert data_image_shape(DataRecipe(name=name, image_size=48)) == shape


HEADS = """
from torch import nn


def transposed(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, num_classes, 2))


def anchored(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3 * (num_classes + 1), 1))


def read_on(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, num_classes, 3), nn.Conv2d(num_classes, 8, 1, bias=False))


def single_for_two(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 1 if num_classes == 2 else num_classes, 1))


def always_the_same(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1))
"""


@pytest.mark.parametrize("head", ["transposed", "anchored", "read_on", "single_for_two", "always_the_same"])
def test_the_number_of_classes_is_read_off_whatever_follows_it(networks: Path, head: str) -> None:
    (networks / "own_heads.py").write_text(HEADS)
    model = build_model(f"own_heads:{head}", num_classes=6)
    layers = ss.select_layers(model).layers
    rules = ss.SparsifyConfig(target=0.0, fixed_levels={layer.name: 2 for layer in layers})
    ss.save(ss.convert_(model, ss.one_shot_plan(model, rules)), "head.safetensors")
    found = read(Path("head.safetensors"), f"own_heads:{head}")
    torch.testing.assert_close(scores(found), scores(model))
    assert any(isinstance(layer, ss.ShuffledGroupConv2d) for layer in found.modules()) == bool(layers)


def test_a_file_of_another_head_is_not_taken_for_a_number_of_classes(networks: Path) -> None:
    (networks / "own_heads.py").write_text(HEADS)
    ss.save(build_model("own_heads:always_the_same", num_classes=6), "head.safetensors")
    with pytest.raises(ValueError, match="does not hold a network 'own_heads:anchored': its classifier is missing"):
        read(Path("head.safetensors"), "own_heads:anchored")


def test_a_damaged_network_of_a_run_can_be_had_again(call: Any, tiny: tuple[str, ...], finished: Path) -> None:
    path = RunFolder(Path("runs/demo")).model_path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    said = call("summary", "runs/demo", "--model", "tiny_networks:small")
    assert said.status == 2
    assert "is not a readable safetensors file, or damaged" in said.err
    assert "delete it and summary.json and run again" in said.err
    path.unlink()
    said = call("run", "demo", *tiny, "--quiet")
    assert said.status == 2
    assert "delete runs/demo/summary.json to write it again from the last checkpoint" in said.err
    Path("runs/demo/summary.json").unlink()
    assert call("run", "demo", *tiny, "--quiet").status == 0
    assert path.read_bytes() == whole
