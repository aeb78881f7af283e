import copy
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import strucspars as ss
from strucspars.export.storage import SELECTION_KEY, VERSION_KEY
from strucspars.models.cifar import CifarResNet, PreactivationResNet
from strucspars.train.slimming import ChannelSelection, load_slimmed, save_slimmed, select_channels, slim_

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def slimmed(depth: int = 11) -> tuple[nn.Module, ChannelSelection]:
    torch.manual_seed(0)
    model = PreactivationResNet(depth)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
    model(torch.randn(4, 3, 32, 32))  # batch-norm statistics of their own
    selection = select_channels(model, target=0.5)
    return slim_(model, selection).eval(), selection


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_slimmed(*slimmed(), tmp_path / "slim.safetensors")
    return tmp_path / "slim.safetensors"


def test_a_loaded_network_equals_the_saved_one(path: Path) -> None:
    model, _ = slimmed()
    restored = load_slimmed(path, PreactivationResNet(11)).eval()
    assert torch.equal(restored(IMAGES), model(IMAGES))
    torch.testing.assert_close(restored.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_network_without_selected_norms_survives_too(tmp_path: Path) -> None:
    model = CifarResNet(8).eval()
    selection = select_channels(model, target=0.4)
    save_slimmed(slim_(model, selection), selection, tmp_path / "slim.safetensors")
    restored = load_slimmed(tmp_path / "slim.safetensors", CifarResNet(8)).eval()
    assert torch.equal(restored(IMAGES), model(IMAGES))


def test_the_file_holds_the_narrow_tensors_only(path: Path) -> None:
    dense = sum(tensor.nbytes for tensor in PreactivationResNet(11).state_dict().values())
    # Half the parameters; the selected channels and the statistics come on top.
    assert sum(tensor.nbytes for tensor in load_file(path).values()) < 0.6 * dense


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_slimmed(*slimmed(), path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        save_slimmed(*slimmed(), tmp_path / "missing" / "slim.safetensors")


def rewritten(path: Path, change: Callable[[Any, Any], object]) -> None:
    """Write the file again with its tensors and metadata changed."""
    tensors = load_file(path)
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    metadata = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def without_metadata(path: Path) -> None:
    save_file(load_file(path), path)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pickled(path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, path)


def a_grouped_network(path: Path) -> None:
    ss.save(PreactivationResNet(11), path)


def newer(path: Path) -> None:
    def change(tensors: Any, metadata: Any) -> None:
        metadata[SELECTION_KEY] = metadata[SELECTION_KEY].replace('"format_version": 1', '"format_version": 7')

    rewritten(path, change)


def a_tensor_less(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: tensors.pop("fc.bias"))


def a_tensor_more(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: tensors.update({"more": torch.zeros(1)}))


def wrong_shape(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: tensors.update({"fc.bias": torch.zeros(3)}))


def wrong_kind(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: tensors.update({"fc.bias": torch.zeros(10, dtype=torch.int64)}))


def wrong_channels(path: Path) -> None:
    rewritten(path, lambda tensors, metadata: tensors["bn.kept"].fill_(10**6))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "not a readable safetensors file, or damaged"),
        (empty, "not a readable safetensors file, or damaged"),
        (pickled, "not a readable safetensors file, or damaged"),
        (a_grouped_network, "was not written by save_slimmed"),
        (without_metadata, "was not written by save_slimmed"),
        (newer, "format_version: must be 1, got 7; upgrade strucspars"),
        (a_tensor_less, r"another network: it lacks \['fc.bias'\]"),
        (a_tensor_more, r"another network: .* has \['more'\] in addition"),
        (wrong_shape, r"'fc.bias' is torch.float32 \(3,\), the model needs torch.float32 \(10,\)"),
        (wrong_kind, "'fc.bias' is torch.int64"),
        (wrong_channels, "'bn.kept' contradicts the file's own plan or selection"),
    ],
)
def test_a_bad_file_is_refused_and_the_network_untouched(
    path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(path)
    model = PreactivationResNet(11)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message) as error:
        load_slimmed(path, model)
    assert str(path) in str(error.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (PreactivationResNet(20), "another network: batch norm"),
        (CifarResNet(8), "another network: batch norm"),
        (nn.Linear(2, 2), "PreactivationResNet and CifarResNet only, got Linear"),
        (PreactivationResNet(11, num_classes=100), r"'fc.weight' is .* the model needs"),
        (slimmed()[0], "slim already"),
    ],
)
def test_another_network_is_refused_and_untouched(path: Path, model: nn.Module, message: str) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"{path}: .*{message}"):
        load_slimmed(path, model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no saved network at .*nothing.safetensors"):
        load_slimmed(tmp_path / "nothing.safetensors", PreactivationResNet(11))
    with pytest.raises(FileNotFoundError, match=f"no saved network at {tmp_path}"):
        load_slimmed(tmp_path, PreactivationResNet(11))


def test_the_file_says_which_version_wrote_it(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        assert file.metadata()[VERSION_KEY] == ss.__version__
