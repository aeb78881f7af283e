import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from strucspars.models.catalogue import build_model, torchvision_names
from strucspars.models.cifar import CifarResNet, PreactivationResNet

USER_MODULE = """
import torch
number = 3
def net(num_classes): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, num_classes))
def fixed(num_classes): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 7))
def pair(num_classes): return torch.nn.Identity(), num_classes
def no_classes(): return torch.nn.Identity()
def more(num_classes, width): return torch.nn.Identity()
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_networks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import a_package_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(
    ("name", "kind", "params"),
    [
        ("preact-resnet20", PreactivationResNet, 219_482),
        ("cifar-resnet20", CifarResNet, 269_722),
        ("resnet18", torchvision.models.ResNet, 11_181_642),
    ],
)
def test_a_name_gives_the_network(name: str, kind: type, params: int) -> None:
    with torch.device("meta"):
        model = build_model(name, num_classes=10, image_shape=(3, 32, 32))
    assert isinstance(model, kind)
    assert sum(parameter.numel() for parameter in model.parameters()) == params


def test_the_user_can_name_a_function(user_module: str) -> None:
    model = build_model(f"{user_module}:net", num_classes=5, image_shape=(3, 2, 2))
    assert isinstance(model, nn.Sequential)
    assert model[1].out_features == 5


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (":nett", ["has no 'nett'", "did you mean 'net'?"]),
        (":", ["has no ''"]),
        (":number", ["'int' object is not callable"]),
        (":pair", ["must return a torch.nn.Module, returned a tuple"]),
        (":no_classes", ["num_classes"]),
        (":more", ["missing 1 required positional argument: 'width'"]),
        (".deeper:net", ["is not a package"]),
        ("_broken:net", ["No module named 'a_package_that_nobody_has'"]),
        ("x:net", ["No module named", "PYTHONPATH"]),
    ],
)
def test_a_function_that_builds_no_network_is_named(user_module: str, function: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=f"network '{user_module}") as caught:
        build_model(f"{user_module}{function}", num_classes=5)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("name", [":net", ".relative:net"])
def test_a_module_without_a_full_name_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be imported"):
        build_model(name, num_classes=5)


def test_a_network_must_take_the_images_and_return_the_classes(user_module: str) -> None:
    with pytest.raises(ValueError, match=r"'.*:net' cannot take images of shape \(3, 4, 4\)"):
        build_model(f"{user_module}:net", num_classes=5, image_shape=(3, 4, 4))
    with pytest.raises(ValueError, match=r"must return scores of shape \(1, 5\) for one image, got \(1, 7\)"):
        build_model(f"{user_module}:fixed", num_classes=5, image_shape=(3, 2, 2))
    with pytest.raises(ValueError, match=r"cannot take images of shape \(1, 32, 32\)"):
        build_model("preact-resnet20", num_classes=5, image_shape=(1, 32, 32))


def test_checking_the_images_leaves_mode_statistics_and_random_state_alone() -> None:
    torch.manual_seed(0)
    plain = build_model("preact-resnet20", num_classes=4)
    after_plain = torch.rand(1)
    torch.manual_seed(0)
    checked = build_model("preact-resnet20", num_classes=4, image_shape=(3, 8, 8))
    assert torch.equal(torch.rand(1), after_plain)
    assert checked.training
    torch.testing.assert_close(checked.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resnet5O", "resnet50"),
        ("preact-resnet-20", "preact-resnet20"),
        ("preact-resnet020", "preact-resnet20"),
        ("cifarresnet56", "cifar-resnet56"),
        ("resnetv2_50", "timm:resnetv2_50"),
        ("", None),
    ],
)
def test_an_unknown_name_comes_with_the_nearest_one(name: str, near: str | None) -> None:
    with pytest.raises(ValueError, match=f"there is no network '{name}'") as caught:
        build_model(name, num_classes=10)
    assert "timm:NAME" in str(caught.value)
    if near is not None:
        assert f"did you mean {near!r}?" in str(caught.value)


@pytest.mark.parametrize(("name", "rule"), [("preact-resnet50", "9 n"), ("cifar-resnet55", "6 n")])
def test_a_depth_that_does_not_exist_is_named(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=f"network '{name}': depth must be {rule}"):
        build_model(name, num_classes=10)


def test_detectors_are_no_classifiers() -> None:
    assert "fasterrcnn_resnet50_fpn" not in torchvision_names()
    with pytest.raises(ValueError, match="there is no network 'fcn_resnet50'"):
        build_model("fcn_resnet50", num_classes=10)


def test_networks_with_auxiliary_classifiers_return_one_output_while_training() -> None:
    with torch.device("meta"):
        model = build_model("googlenet", num_classes=10)
        assert model.train()(torch.empty(2, 3, 224, 224)).shape == (2, 10)


def test_timm_networks_have_a_prefix() -> None:
    with torch.device("meta"):
        model = build_model("timm:resnet10t", num_classes=7)
    assert model.get_parameter("fc.weight").shape[0] == 7


@pytest.mark.parametrize("name", ["timm:resnet10tt", "timm:hf_hub:someone/resnet10t", "timm:"])
def test_timm_networks_are_never_fetched_from_a_hub(name: str) -> None:
    with pytest.raises(ValueError, match=r"timm has no network .*did you mean 'timm:"):
        build_model(name, num_classes=7)


def test_where_timm_is_missing_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"'timm:resnet10t' needs timm.*pip install timm"):
        build_model("timm:resnet10t", num_classes=7)


@pytest.mark.parametrize("num_classes", [0, True, 2.0])
def test_an_impossible_number_of_classes_is_an_error(num_classes: int) -> None:
    with pytest.raises(ValueError, match="num_classes"):
        build_model("preact-resnet20", num_classes=num_classes)
