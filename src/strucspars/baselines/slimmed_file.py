"""One safetensors file per slimmed network, the channel selection in its metadata. Nothing in it is ever executed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from strucspars._version import __version__
from strucspars.baselines.channel_selection import ChannelSelection
from strucspars.baselines.narrowing import check_slimmed, slim_
from strucspars.export.os_errors import check_readable
from strucspars.export.storage import SELECTION_KEY, VERSION_KEY, write_tensors
from strucspars.nn.copying import copied

Model = TypeVar("Model", bound=nn.Module)


def save_slimmed(model: nn.Module, selection: ChannelSelection, path: str | os.PathLike[str]) -> None:
    """Write a slimmed network to one safetensors file, all or nothing.

    Args:
        model: a network after `slim_`.
        selection: the one it was slimmed with.
        path: where; a file that is there is replaced only by a complete one.

    Raises:
        ValueError: the selection is not the network's.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> from strucspars.baselines.slimming import select_channels
    >>> from strucspars.models.cifar_resnet import CifarResNet
    >>> model = CifarResNet(8)
    >>> selection = select_channels(model, target=0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_slimmed(slim_(model, selection), selection, f"{folder}/slim.safetensors")
    ...     restored = load_slimmed(f"{folder}/slim.safetensors", CifarResNet(8))
    >>> torch.equal(restored.layer1[0].conv1.weight, model.layer1[0].conv1.weight)
    True
    """
    check_slimmed(model, selection)
    write_tensors(Path(path), model.state_dict(), {SELECTION_KEY: selection.to_json(), VERSION_KEY: __version__})


def load_slimmed(path: str | os.PathLike[str], model: Model) -> Model:
    """Turn a freshly built, dense network into the saved slim one, in place; returns the model.

    If the file is damaged, foreign, newer, or that of another network, the model stays as it is.

    Args:
        path: a file that `save_slimmed` has written.
        model: the same network, dense.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or the model does not fit; the message says where.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no slimmed network at {path}")
    selection, tensors = _read(path)
    try:
        # A copy goes first: what does not fit shows there, and the caller's model stays whole.
        trial = slim_(copied(model), selection)
    except ValueError as error:
        raise ValueError(f"cannot load {path}: {error}") from error
    _check_tensors(path, tensors, trial.state_dict())
    slim_(model, selection).load_state_dict(tensors)
    return model


def _read(path: Path) -> tuple[ChannelSelection, dict[str, torch.Tensor]]:
    check_readable(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text = (file.metadata() or {}).get(SELECTION_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file, or damaged: {error}; restore it from a copy"
        ) from error
    if text is None:
        raise ValueError(f"{path} was not written by save_slimmed: it carries no channel selection")
    try:
        return ChannelSelection.from_json(text), tensors
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_tensors(path: Path, tensors: Mapping[str, torch.Tensor], needed: Mapping[str, torch.Tensor]) -> None:
    """The file's tensors must be those of the slimmed network, and its selected channels those of the selection."""
    differing = sorted(set(tensors) ^ set(needed))
    if differing:
        raise ValueError(f"{path} belongs to another network: {differing[:3]} are only in one of the two")
    for name, own in needed.items():
        found = tensors[name]
        if found.shape != own.shape or found.is_floating_point() != own.is_floating_point():
            raise ValueError(
                f"{path}: {name!r} is {found.dtype} {tuple(found.shape)}, the network needs {own.dtype} "
                f"{tuple(own.shape)}"
            )
        if name.endswith(".kept") and not torch.equal(found, own.cpu()):
            raise ValueError(f"{path}: {name!r} contradicts the channel selection; the file is damaged")
