import errno
import hashlib
import io
import logging
import os
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from strucspars.train import checkpoint
from strucspars.train.checkpoint import load_checkpoint, load_named, save_checkpoint, save_named


def state(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "weights": torch.full((50,), epoch)}


def assert_epoch(loaded: dict[str, Any] | None, epoch: int) -> None:
    assert loaded is not None
    assert loaded["epoch"] == epoch
    assert torch.equal(loaded["weights"], torch.full((50,), epoch))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def foreign(path: Path) -> None:
    torch.save({"epoch": 9}, path)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [flip, cut, empty, cut_in_the_header, foreign, folder_instead]


def test_there_is_none_before_the_first(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    assert load_checkpoint(tmp_path / "nowhere") is None
    assert load_named(tmp_path, "sparsified") is None


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for epoch in range(3):
        save_checkpoint(tmp_path, state(epoch))
        assert_epoch(load_checkpoint(tmp_path), epoch)
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "previous.pt"}
    (tmp_path / "last.pt").unlink()
    assert_epoch(load_checkpoint(tmp_path), 1)


def test_all_that_training_holds_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2])
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    saved: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": torch.get_rng_state(),
        "seeds": (2**64 + 1, -1, 0.1, float("inf"), None, True, "ü", b"\x00"),
        "kinds": [torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"), {1}, Counter("aab"), OrderedDict(a=1)],
        "half": torch.randn(3).bfloat16(),
    }
    save_checkpoint(tmp_path, saved)
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    torch.testing.assert_close(loaded.pop("half"), saved.pop("half"), rtol=0, atol=0)
    torch.testing.assert_close(loaded.pop("rng"), saved.pop("rng"), rtol=0, atol=0)
    torch.testing.assert_close(loaded.pop("model"), dict(saved.pop("model")), rtol=0, atol=0)
    momenta = [loaded["optimizer"].pop("state"), saved["optimizer"].pop("state")]
    torch.testing.assert_close(*momenta, rtol=0, atol=0)
    assert loaded == saved


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"lr": np.float64(0.1)}, "the state to save holds more than data, or none: numpy._core.multiarray.scalar"),
        ([np.zeros(2)], "numpy._core.multiarray._reconstruct"),
        ({Path("a"): 1}, r"pathlib\.\S*Path"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (print, "print"),
    ],
)
def test_a_state_that_could_not_be_loaded_is_refused_when_saved(tmp_path: Path, value: Any, complaint: str) -> None:
    save_checkpoint(tmp_path, state(1))
    with pytest.raises(ValueError, match=complaint):
        save_checkpoint(tmp_path, {"value": value})
    with pytest.raises(ValueError, match=complaint):
        save_named(tmp_path, "kept", {"value": value})
    assert_epoch(load_checkpoint(tmp_path), 1)
    with pytest.raises(ValueError, match="is a list instead of a dict"):
        save_checkpoint(tmp_path, [1])  # type: ignore[arg-type]  # the bad value is the point
    with pytest.raises(ValueError, match="is a OrderedDict instead of a dict"):
        save_checkpoint(tmp_path, OrderedDict(epoch=1))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_last_one_is_replaced_by_the_previous_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, state(2))
    with caplog.at_level(logging.WARNING):
        assert_epoch(load_checkpoint(tmp_path), 2)
        assert not caplog.records
        damage(tmp_path / "last.pt")
        assert_epoch(load_checkpoint(tmp_path), 1)
    (record,) = caplog.records
    assert str(tmp_path / "last.pt") in record.getMessage()
    assert record.getMessage().endswith(f"resuming from {tmp_path / 'previous.pt'} instead")


@pytest.mark.parametrize("damage", [flip, cut, empty, cut_in_the_header, foreign])
def test_a_damaged_file_never_pushes_out_a_good_one(tmp_path: Path, damage: Any) -> None:
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, state(2))
    damage(tmp_path / "last.pt")
    save_checkpoint(tmp_path, state(3))
    assert_epoch(load_checkpoint(tmp_path), 3)
    (tmp_path / "last.pt").unlink()
    assert_epoch(load_checkpoint(tmp_path), 1)


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_any_usable_one_both_are_named_with_the_remedy(tmp_path: Path, damage: Any) -> None:
    save_checkpoint(tmp_path, state(1))
    damage(tmp_path / "last.pt")
    with pytest.raises(ValueError, match=r"last\.pt.*; \S*previous\.pt is missing; restore one from a copy, or"):
        load_checkpoint(tmp_path)
    if damage is folder_instead:
        return
    (tmp_path / "last.pt").rename(tmp_path / "previous.pt")
    with pytest.raises(ValueError, match=r"no checkpoint can be used: \S*last\.pt is missing; .*previous\.pt"):
        load_checkpoint(tmp_path)


def test_every_flipped_bit_of_a_sample_is_found(tmp_path: Path) -> None:
    save_named(tmp_path, "kept", {"weights": torch.arange(20)})
    path = tmp_path / "kept.pt"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"kept\.pt .*restore one from a copy"):
            load_named(tmp_path, "kept")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_process_killed_between_the_two_renames_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_links: bool
) -> None:
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, state(2))
    # What lies there then: the new one complete but unnamed, and the former last one as previous, too or alone.
    (tmp_path / "last.pt").rename(tmp_path / "previous.pt")
    if has_links:
        (tmp_path / "last.pt").hardlink_to(tmp_path / "previous.pt")
    assert_epoch(load_checkpoint(tmp_path), 2)
    assert ("last.pt is missing; resuming from" in caplog.text) is not has_links
    save_checkpoint(tmp_path, state(3))
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "previous.pt"}
    assert_epoch(load_checkpoint(tmp_path), 3)
    (tmp_path / "last.pt").unlink()
    assert_epoch(load_checkpoint(tmp_path), 2)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_keeps_the_former_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    for epoch in (1, 2):
        save_checkpoint(tmp_path, state(epoch))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match=r"last\.pt: No space left.*what was there is kept; free some space"):
        save_checkpoint(tmp_path, state(3))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Hostile:
    """Unpickling creates the marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def wrapped(payload: bytes) -> bytes:
    """The payload as a checkpoint whose checksum is right."""
    return b"sspckpt1" + hashlib.sha256(payload).digest() + payload


def zipped(value: object, *, legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_hostile_checkpoint_is_refused_and_executes_nothing(tmp_path: Path, form: str) -> None:
    marker = tmp_path / "marker"
    value = {"epoch": 1, "weights": Hostile(marker)}
    payload = pickle.dumps(value) if form == "pickle" else zipped(value, legacy=form == "legacy")
    for name in ("last.pt", "previous.pt", "kept.pt"):
        (tmp_path / name).write_bytes(wrapped(payload))
    with pytest.raises(ValueError, match=r"last\.pt holds more than data, or none: .*previous\.pt holds more than"):
        load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"kept\.pt holds more than data, or none") as caught:
        load_named(tmp_path, "kept")
    assert "weights_only" not in str(caught.value).split(";")[-1]
    assert not marker.exists()
    if form == "zip":
        torch.load(io.BytesIO(payload), weights_only=False)
        assert marker.exists(), "the file was not hostile"


@pytest.mark.parametrize("value", [[1, 2], torch.zeros(2), OrderedDict(epoch=1)])
def test_a_checkpoint_of_something_else_than_a_state_is_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "kept.pt").write_bytes(wrapped(zipped(value, legacy=False)))
    with pytest.raises(ValueError, match=r"kept\.pt is a \w+ instead of a dict"):
        load_named(tmp_path, "kept")


def test_an_unreadable_checkpoint_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, state(2))

    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(PermissionError, match=r"cannot read .*last\.pt: Permission denied; change its permissions"):
        load_checkpoint(tmp_path)


def test_named_checkpoints_are_kept_beside_the_last_ones(tmp_path: Path) -> None:
    save_named(tmp_path, "sparsified", state(7))
    for epoch in range(3):
        save_checkpoint(tmp_path, state(epoch))
    assert_epoch(load_named(tmp_path, "sparsified"), 7)
    save_named(tmp_path, "sparsified", state(8))
    assert_epoch(load_named(tmp_path, "sparsified"), 8)


def test_tensors_come_back_on_the_cpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    save_checkpoint(tmp_path, {"weights": torch.ones(2, device="cuda")})
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded["weights"].device.type == "cpu"


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_without_links_the_former_checkpoint_is_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    for epoch in (1, 2, 3):
        save_checkpoint(tmp_path, state(epoch))
    assert_epoch(load_checkpoint(tmp_path), 3)
    (tmp_path / "last.pt").unlink()
    assert_epoch(load_checkpoint(tmp_path), 2)


def test_a_link_that_leads_nowhere_is_not_taken_for_a_run_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "last.pt").symlink_to(tmp_path / "gone.pt")
    with pytest.raises(ValueError, match=r"no checkpoint can be used: .*last\.pt is missing"):
        load_checkpoint(tmp_path)


def test_an_unreadable_last_one_keeps_no_run_from_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, state(2))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_bytes", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        save_checkpoint(tmp_path, state(3))
    assert_epoch(load_checkpoint(tmp_path), 3)
    (tmp_path / "last.pt").unlink()
    assert_epoch(load_checkpoint(tmp_path), 1)


def test_a_reader_that_stops_without_a_word_is_named_by_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_named(tmp_path, "kept", state(1))
    monkeypatch.setattr(torch, "load", Mock(side_effect=EOFError))
    with pytest.raises(ValueError, match=r"kept\.pt holds more than data, or none: EOFError; restore"):
        load_named(tmp_path, "kept")
