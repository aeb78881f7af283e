"""Calibration data, and what a trained network tells about it: inputs of its layers, gradients of its predictions."""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from strucspars.cost.counting import uncompiled, undisturbed
from strucspars.nn.names import unwrapped

logger = logging.getLogger(__name__)

# Images, or a pair of images and labels, as a `DataLoader` yields them.
CalibrationBatch = torch.Tensor | Sequence[torch.Tensor]
# `on_progress(what, done, total)`: called again and again during long work; each `what` starts at 0.
OnProgress = Callable[[str, int, int], None]

MAX_IMAGES = 1024
# The activations of that many images are in memory at a time.
BATCH_SIZE = 16
# Every so many batches one measures what fits to the others leave.
HELD_OUT = 4


@dataclass(frozen=True, eq=False)
class Calibration:
    """Images in batches of at most `BATCH_SIZE`, and their labels where the data had some."""

    images: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...] | None

    @staticmethod
    def of(
        batches: "Iterable[CalibrationBatch] | Calibration", *, name: str = "calibration", limit: int = MAX_IMAGES
    ) -> "Calibration":
        """Collect the first images: a generator can be read only once, and every step needs them again."""
        if isinstance(batches, Calibration):
            return batches
        images: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []
        count = 0
        for batch in batches:
            parts = [batch] if isinstance(batch, torch.Tensor) else list(batch)
            kept = [part[: limit - count] for part in parts[:2] if isinstance(part, torch.Tensor)]
            count += len(kept[0])
            images += torch.split(kept[0], BATCH_SIZE)
            labels += torch.split(kept[1], BATCH_SIZE) if len(kept) > 1 else ()
            if count >= limit:
                break
        if not count:
            raise ValueError(f"{name} holds no batch; give at least one of images")
        logger.info("%d calibration images are used", count)
        return Calibration(tuple(images), tuple(labels) if len(labels) == len(images) else None)

    def on(self, device: torch.device) -> "Calibration":
        """The images where a network computes, in the memory layout that is faster there."""
        layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
        images = (each.contiguous(memory_format=layout) if each.dim() == 4 else each for each in self.images)
        return Calibration(tuple(each.to(device) for each in images), self.labels)

    def first(self, count: int) -> "Calibration":
        """The first images, whole batches."""
        starts = itertools.accumulate(map(len, self.images), initial=0)
        return self._batches(place for place, start in enumerate(starts) if start < min(count, len(self)))

    def is_held_out(self, place: int) -> bool:
        """Whether a batch is for measuring what fits to the others leave."""
        every = min(HELD_OUT, len(self.images))
        return every > 1 and place % every == every - 1

    def split(self) -> "tuple[Calibration, Calibration]":
        """Images to fit with, and a quarter of them, of other batches where there are several, to measure with."""
        if len(self.images) == 1:
            return self, self
        places = range(len(self.images))
        held = [place for place in places if self.is_held_out(place)]
        return self._batches(place for place in places if place not in held), self._batches(held)

    def _batches(self, places: Iterable[int]) -> "Calibration":
        chosen = list(places)
        labels = self.labels and tuple(self.labels[place] for place in chosen)
        return Calibration(tuple(self.images[place] for place in chosen), labels)

    def __len__(self) -> int:
        """Number of images."""
        return sum(map(len, self.images))


def ignore_progress(what: str, done: int, total: int) -> None:
    """For callers who want no progress."""


def device_of(model: nn.Module) -> torch.device:
    """Where the network computes."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[..., torch.Tensor | None]) -> Iterator[None]:
    """Call `hook(module, inputs, output)` after every call of these modules, ahead of the user's hooks.

    What it returns, unless None, takes the place of the output.
    """
    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(hook, prepend=True).remove)
        yield


def logits_of(outputs: object) -> torch.Tensor:
    """The first output tensor as logits `(batch, classes, positions)`; a single logit is that of a yes."""
    found = next((leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)), None)
    if found is None or not found.is_floating_point():
        raise ValueError(
            "calibration reads the network's first output tensor as logits of shape (batch, classes, ...), but the "
            "network returns no floating-point tensor; wrap it in a module that returns its logits"
        )
    logits = found.float().reshape(len(found), found.shape[1] if found.dim() > 1 else 1, -1)
    return torch.cat([logits, torch.zeros_like(logits)], 1) if logits.shape[1] == 1 else logits


def divergence(model: nn.Module, other: nn.Module, images: Iterable[torch.Tensor]) -> float:
    """Mean divergence KL(p || q) of the predictions q of `other` from those p of `model`, in nats per image."""
    total, count = 0.0, 0
    with undisturbed(model), undisturbed(other):
        for batch in images:
            batch = batch.to(device_of(model))
            wanted, found = (logits_of(network(batch)).log_softmax(1) for network in (model, other))
            total += float((wanted.exp() * (wanted - found)).sum(1).mean(1).sum())
            count += len(batch)
    return total / count


# `visit(module, inputs, gradients)`: of a batch, what a layer reads, and the gradients of its outputs.
Visit = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]


def visit_gradients(
    model: nn.Module,
    modules: Iterable[nn.Module],
    calibration: Calibration,
    visit: Visit,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    uses_labels: bool = False,
) -> None:
    """Give `visit` gradients at the outputs of some layers, image by image, of a random measure of the predictions.

    The mean square of these gradients is the Fisher information, the curvature of the divergence of the predictions.
    With `uses_labels`, they are those of the log-likelihood of the data's labels, where the data have some.
    """
    device, generator = device_of(model), torch.Generator().manual_seed(0)

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        read = inputs[0].detach()
        output.register_hook(lambda gradient: visit(module, read, gradient))  # type: ignore[no-untyped-call]  # in torch

    network = unwrapped(model)
    with undisturbed(model), uncompiled(model), _frozen(network), torch.enable_grad(), hooked(modules, note):
        for place, images in enumerate(calibration.images):
            logits = logits_of(network(images.to(device).requires_grad_()))
            given = calibration.labels[place] if uses_labels and calibration.labels is not None else None
            if given is None:
                torch.autograd.backward(logits, _root_of_curvature(logits.detach(), generator))
            else:
                labels = given.to(device).long().reshape(len(images), 1, -1).expand(-1, 1, logits.shape[2])
                torch.autograd.backward(logits.log_softmax(1).gather(1, labels).mean((1, 2)).sum())
            progress(place + 1, len(calibration.images))


def _root_of_curvature(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random v with `E[v v'] = diag(p) - p p'` for the prediction p, the curvature of the divergence by the logits.

    Labels drawn from p would do as well on average, but a confident network then has huge gradients for a few of them.
    """
    chances = logits.softmax(1)
    drawn = torch.randn(logits.shape, generator=generator).to(logits.device) * chances.sqrt()
    return (drawn - chances * drawn.sum(1, keepdim=True)) / math.sqrt(logits.shape[2])


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Without gradients of parameters, which take a third of the time."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)
