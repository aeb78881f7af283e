import logging
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from strucspars.convert.conversion import convert_
from strucspars.export.storage import PLAN_KEY, TRANSFORM_KEY, read_tensors, save
from strucspars.models import weights
from strucspars.models.catalogue import build_model
from strucspars.models.cifar import CifarResNet
from strucspars.models.weights import load_weights_
from strucspars.nn.layers import kept_connections
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.one_shot import one_shot_plan
from strucspars.train.slimming import save_slimmed, select_channels, slim_


def small_network(classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, classes))


def copied_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state},
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {f"_orig_mod.module.{key}": value for key, value in state.items()},
        lambda state: {"state_dict": {f"module._orig_mod.{key}": value for key, value in state.items()}},
        lambda state: {key.replace("1.", "1._orig_mod."): value for key, value in state.items()},
        lambda state: {f"module.{key.replace('1.', '1._orig_mod.')}": value for key, value in state.items()},
        lambda state: {key: value for key, value in state.items() if "num_batches" not in key},
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".checkpoint"])
def test_checkpoints_of_every_wrapping_are_loaded(
    tmp_path: Path, wrap: Callable[[dict[str, torch.Tensor]], object], suffix: str
) -> None:
    stored, model = small_network(), small_network()
    torch.save(wrap(copied_state(stored)), tmp_path / f"net{suffix}")
    load_weights_(model, str(tmp_path / f"net{suffix}"), "small")
    assert_same_state(model, copied_state(stored))


def test_safetensors_are_loaded(tmp_path: Path) -> None:
    stored, model = small_network(), small_network()
    save_file(copied_state(stored), tmp_path / "net.safetensors")
    load_weights_(model, str(tmp_path / "net.safetensors"), "small")
    assert_same_state(model, copied_state(stored))


def test_a_damaged_note_about_inputs_is_named(tmp_path: Path) -> None:
    save_file(copied_state(small_network()), tmp_path / "net.safetensors", {TRANSFORM_KEY: "{"})
    with pytest.raises(ValueError, match=r"net\.safetensors': strucspars\.transform_input: is not valid JSON"):
        load_weights_(small_network(), str(tmp_path / "net.safetensors"), "small")


def test_a_submodule_called_module_keeps_its_name(tmp_path: Path) -> None:
    stored, model = (nn.ModuleDict({"module": nn.Linear(2, 2)}) for _ in range(2))
    torch.save(stored.state_dict(), tmp_path / "net.pt")
    load_weights_(model, str(tmp_path / "net.pt"), "small")
    assert_same_state(model, copied_state(stored))


def test_a_classifier_of_other_classes_keeps_its_fresh_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored, model = small_network(classes=8), small_network(classes=3)
    fresh = copied_state(model)
    torch.save(stored.state_dict(), tmp_path / "net.pt")
    with caplog.at_level(logging.INFO, logger=weights.__name__):
        load_weights_(model, str(tmp_path / "net.pt"), "small")
    (line,) = caplog.messages
    assert "classifier '3' has another number of classes" in line
    expected = {key: (fresh if key.startswith("3.") else copied_state(stored))[key] for key in fresh}
    assert_same_state(model, expected)


def test_a_classifier_of_other_classes_is_an_error_where_it_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(small_network(classes=8).state_dict(), tmp_path / "net.pt")
    model = small_network(classes=3)
    fresh = copied_state(model)
    with pytest.raises(ValueError, match="are for 8 classes, not 3; build the network for as many"):
        load_weights_(model, str(tmp_path / "net.pt"), "small", with_classifier=True)
    assert_same_state(model, fresh)
    assert caplog.messages == []
    load_weights_(small_network(classes=8), str(tmp_path / "net.pt"), "small", with_classifier=True)


def test_weights_of_the_same_network_are_loaded_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(small_network().state_dict(), tmp_path / "net.pt")
    load_weights_(small_network(), str(tmp_path / "net.pt"), "small")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"0.weight": torch.zeros(5, 3, 3, 3)}, ["0.weight (5, 3, 3, 3) where (4, 3, 3, 3) is wanted"]),
        ({"3.weight": torch.zeros(3, 5)}, ["3.weight (3, 5) where (3, 4) is wanted"]),
        ({"3.bias": torch.zeros(8)}, ["3.bias (8,) where (3,) is wanted"]),
        ({"4.weight": torch.zeros(2)}, ["the network lacks: 4.weight"]),
        ({"0.bias": None}, ["the weights lack: 0.bias"]),
        ({f"extra{index}": torch.zeros(1) for index in range(9)}, ["extra4 and 4 more"]),
    ],
)
def test_weights_of_another_network_are_an_error_and_change_nothing(
    tmp_path: Path, change: dict[str, torch.Tensor | None], words: list[str]
) -> None:
    state = copied_state(small_network()) | change
    torch.save({key: value for key, value in state.items() if value is not None}, tmp_path / "net.pt")
    model = small_network()
    before = copied_state(model)
    with pytest.raises(ValueError, match=r"net\.pt' for network 'small' belong to another network") as caught:
        load_weights_(model, str(tmp_path / "net.pt"), "small")
    assert [word for word in words if word not in str(caught.value)] == []
    assert_same_state(model, before)


class TouchesAFile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
        return Path.touch, (self.marker,)


def test_a_pickled_model_is_named_without_advice_to_run_it(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    torch.save(small_network(), path)
    with pytest.raises(ValueError, match=r"torch.nn.modules.container.Sequential.*state_dict\(\) alone$") as caught:
        load_weights_(small_network(), str(path), "net")
    assert "weights_only" not in str(caught.value)


def test_a_slimmed_network_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "slim.safetensors"
    model = CifarResNet(8)
    selection = select_channels(model, target=0.3)
    save_slimmed(slim_(model, selection), selection, path)
    with pytest.raises(ValueError, match=r"slim\.safetensors': this network is slimmed already; give dense weights"):
        load_weights_(CifarResNet(8), str(path), "cifar-resnet8")


def test_weights_with_a_damaged_plan_are_named(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    save_file(small_network().state_dict(), path, {PLAN_KEY: "{"})
    with pytest.raises(ValueError, match=r"^weights .*small\.safetensors': "):
        load_weights_(small_network(), str(path), "net")


def two_convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))


def test_a_compressed_network_gives_the_dense_weights_of_the_same_function(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    small, loaded, images = two_convolutions(), two_convolutions(), torch.randn(2, 4, 8, 8)
    plan = one_shot_plan(small, target=0.3)
    save(convert_(small, plan), path)
    load_weights_(loaded, str(path), "net")
    assert type(loaded[1]) is nn.Conv2d
    torch.testing.assert_close(loaded(images), small(images))
    assert not loaded.get_parameter("1.weight")[~kept_connections(plan.layers["1"])].any()


def test_a_compressed_network_that_contradicts_its_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    small = two_convolutions()
    save(convert_(small, one_shot_plan(small, target=0.3)), path)
    tensors, metadata = read_tensors(path)
    save_file(tensors | {"1.weight": torch.zeros(8, 3, 3, 3)}, path, metadata)
    with pytest.raises(ValueError, match=r"1\.weight contradicts the file's own plan"):
        load_weights_(two_convolutions(), str(path), "net")
    save_file(tensors, path, metadata | {"strucspars.format": "1"})
    with pytest.raises(ValueError, match="of another storage format"):
        load_weights_(two_convolutions(), str(path), "net")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
@pytest.mark.parametrize("plain_pickle", [True, False])
def test_a_hostile_checkpoint_executes_nothing(tmp_path: Path, suffix: str, plain_pickle: bool) -> None:
    marker, path = tmp_path / "executed", tmp_path / f"net{suffix}"
    content = {"state_dict": copied_state(small_network()), "other": TouchesAFile(marker)}
    if plain_pickle:
        path.write_bytes(pickle.dumps(content["other"], protocol=2))
    else:
        torch.save(content, path)
    model = small_network()
    before = copied_state(model)
    with pytest.raises(ValueError, match="was not executed"):
        load_weights_(model, str(path), "small")
    assert not marker.exists()
    assert_same_state(model, before)


@pytest.mark.parametrize("name", ["net.pt", "net.pth", "net.safetensors"])
@pytest.mark.parametrize("keep", [0, 1, 10, 200, -30])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, keep: int) -> None:
    path, whole = tmp_path / name, tmp_path / "whole"
    if name.endswith(".safetensors"):
        save_file(copied_state(small_network()), whole)
    else:
        torch.save(small_network().state_dict(), whole)
    path.write_bytes(whole.read_bytes()[:keep])
    with pytest.raises(ValueError, match=name):
        load_weights_(small_network(), str(path), "small")


def test_a_file_that_its_reader_says_nothing_about_is_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    path.touch()
    with pytest.raises(
        ValueError, match=r"net\.pt': the file is damaged, or of another kind .* \(EOFError\b.*\); give a"
    ):
        load_weights_(small_network(), str(path), "small")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (torch.zeros(3), "got Tensor"),
        ({}, "got keys"),
        ({"net": {"a": torch.zeros(1)}, "epoch": 3}, "got keys net, epoch"),
        ({1: torch.zeros(1)}, "got keys 1"),
        ({"state_dict": {"epoch": 3}}, "got keys epoch"),
    ],
)
def test_a_file_without_a_state_dict_says_what_it_has(tmp_path: Path, content: object, found: str) -> None:
    torch.save(content, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=f"must hold a state dict.*{found}"):
        load_weights_(small_network(), str(tmp_path / "net.pt"), "small")


def test_weights_that_do_not_exist_are_named(tmp_path: Path) -> None:
    model = small_network()
    with pytest.raises(ValueError, match=r"no\.pt': there is no such file"):
        load_weights_(model, str(tmp_path / "no.pt"), "resnet18")
    with pytest.raises(ValueError, match=r"'IMAGENET1K_V9'.* of 'resnet50' are .*IMAGENET1K_V1.*DEFAULT"):
        load_weights_(model, "IMAGENET1K_V9", "resnet50")
    with pytest.raises(ValueError, match="only networks of torchvision have weights by name"):
        load_weights_(model, "DEFAULT", "preact-resnet20")


def stored_densenet() -> dict[str, torch.Tensor]:
    """As torchvision stores them: `norm.1` in place of `norm1`."""
    state = build_model("densenet121", num_classes=1000).state_dict()
    return {key.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): value for key, value in state.items()}


def test_torchvision_weights_are_fetched_with_their_hash_and_old_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, bool]] = []
    stored = stored_densenet()

    def fetch(self: object, *, check_hash: bool, progress: bool) -> dict[str, torch.Tensor]:
        asked.append({"check_hash": check_hash})
        return stored

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", fetch)
    model = build_model("densenet121", num_classes=10)
    load_weights_(model, "DEFAULT", "densenet121")
    assert asked == [{"check_hash": True}]
    key = "features.denseblock1.denselayer1.norm1.running_var"
    assert torch.equal(model.state_dict()[key], stored["features.denseblock1.denselayer1.norm.1.running_var"])
    key = "features.denseblock4.denselayer2.conv2.weight"
    assert torch.equal(model.state_dict()[key], stored["features.denseblock4.denselayer2.conv.2.weight"])


def test_weights_that_cannot_be_fetched_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, *, check_hash: bool, progress: bool) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", fail)
    with pytest.raises(ValueError, match="'DEFAULT' of 'resnet18' could not be fetched: no route to host"):
        load_weights_(small_network(), "DEFAULT", "resnet18")


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_file_of_torchvisions_densenet_is_loaded_by_its_old_names(tmp_path: Path, wrapper: str) -> None:
    stored = stored_densenet()
    torch.save({f"{wrapper}{key}": value for key, value in stored.items()}, tmp_path / "densenet121-a639ec97.pth")
    model = build_model("densenet121", num_classes=1000)
    load_weights_(model, str(tmp_path / "densenet121-a639ec97.pth"), "densenet121", with_classifier=True)
    key = "features.denseblock1.denselayer1.norm1.weight"
    assert torch.equal(model.state_dict()[key], stored["features.denseblock1.denselayer1.norm.1.weight"])


def stored_googlenet() -> dict[str, torch.Tensor]:
    """As torchvision stores them: with the heads that only training uses."""
    state: dict[str, torch.Tensor] = torchvision.models.googlenet(aux_logits=True, init_weights=False).state_dict()
    assert any(key.startswith("aux1.") for key in state)
    return state


@pytest.mark.parametrize("source", ["file", "DEFAULT"])
def test_auxiliary_heads_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    stored = stored_googlenet()
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda *_, **__: stored)
    if source == "file":
        source = str(tmp_path / "googlenet-1378be20.pth")
        torch.save(stored, source)
    model = torchvision.models.googlenet(aux_logits=False, init_weights=False, transform_input=True)
    load_weights_(model, source, "googlenet", with_classifier=True)
    assert_same_state(model, {key: value for key, value in stored.items() if not key.startswith("aux")})
    (heads,) = caplog.messages
    assert "googlenet" in heads
    assert "the auxiliary heads aux1, aux2 are left out" in heads


def test_heads_that_the_network_has_are_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = stored_googlenet()
    torch.save(stored, tmp_path / "net.pth")
    model = torchvision.models.googlenet(aux_logits=True, init_weights=False)
    load_weights_(model, str(tmp_path / "net.pth"), "googlenet")
    assert_same_state(model, stored)
    assert "auxiliary" not in caplog.text


@pytest.mark.parametrize(("name", "size"), [("googlenet", 64), ("inception_v3", 80)])
def test_named_weights_compute_what_they_do_in_torchvision(
    monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    stored = torchvision.models.get_model(name, aux_logits=True, init_weights=False).state_dict()
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda *_, **__: stored)
    expected = torchvision.models.get_model(name, weights="DEFAULT").eval()
    model = build_model(name, num_classes=1000).eval()
    load_weights_(model, "DEFAULT", name, with_classifier=True)
    images = torch.randn(1, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected(images))
        expected.transform_input = False
        assert not torch.allclose(model(images), expected(images))


@pytest.mark.parametrize("transform_input", [True, False])
def test_a_file_of_ours_says_whether_inputs_were_transformed(tmp_path: Path, transform_input: bool) -> None:
    model = torchvision.models.googlenet(aux_logits=False, init_weights=False, transform_input=transform_input)
    save(model, tmp_path / "net.safetensors")
    built = build_model("googlenet", num_classes=1000)
    if transform_input:
        load_weights_(built, str(tmp_path / "net.safetensors"), "googlenet")
    else:
        with pytest.raises(ValueError, match=r"trained with transform_input=False, and the network has True; name a"):
            load_weights_(built, str(tmp_path / "net.safetensors"), "googlenet")


def test_names_of_other_networks_are_left_as_they_are(tmp_path: Path) -> None:
    stored, model = (nn.ModuleDict({"aux1": nn.Linear(2, 2)}) for _ in range(2))
    torch.save(stored.state_dict() | {"aux2.weight": torch.zeros(1)}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"the network lacks: aux2\.weight"):
        load_weights_(model, str(tmp_path / "net.pt"), "small")


def test_a_network_that_asks_for_the_version_of_its_weights_is_told(tmp_path: Path) -> None:
    stored, model = (build_model("mnasnet0_5", num_classes=10) for _ in range(2))
    torch.save(stored.state_dict(), tmp_path / "net.pth")
    load_weights_(model, str(tmp_path / "net.pth"), "mnasnet0_5")
    assert_same_state(model, copied_state(stored))


@pytest.mark.parametrize("name", ["net.pt", "net.safetensors"])
def test_a_named_pipe_in_place_of_the_weights_hangs_nothing(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"cannot read .*{name}: it is a pipe, .*; give a regular file"):
        load_weights_(small_network(), str(tmp_path / name), "small")


def test_a_small_file_that_becomes_a_large_one_is_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(2**22), tmp_path / "stored")
    with (
        zipfile.ZipFile(tmp_path / "stored") as stored,
        zipfile.ZipFile(tmp_path / "net.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in stored.namelist():
            packed.writestr(entry, stored.read(entry))
    with pytest.raises(ValueError, match=r"net\.pt': the file is damaged.* its entries are packed, and would"):
        load_weights_(small_network(), str(tmp_path / "net.pt"), "small")


def test_a_network_that_has_lost_channels_gives_no_dense_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4, 3))
    options = SparsifyConfig(target=0.2, narrow="all", width_multiple=2, largest_levels={"*": 1})
    save(
        convert_(model, one_shot_plan(model, options, example_inputs=torch.zeros(1, 3, 1, 1))),
        tmp_path / "a.safetensors",
    )
    dense = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="this network has lost channels, and has no weights for the dense one"):
        load_weights_(dense, str(tmp_path / "a.safetensors"), "small")
