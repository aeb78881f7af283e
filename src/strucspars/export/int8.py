"""Int8 files: static quantisation of the ONNX graph after folding, checked before the file gets its name."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strucspars.export.int8_graph import Int8Graph, copy_of, steps
from strucspars.export.onnx import GraphExporter, onnx_model
from strucspars.export.program import (
    Arguments,
    ExampleBatch,
    Exporter,
    Inference,
    InferenceProgram,
)

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger(__name__)

Images = torch.Tensor | Sequence[torch.Tensor]

FEWEST_IMAGES = 32
# Without labelled images, every so many-th one is kept to check with.
HELD_OUT = 5
# Layers are ranked by the error that each causes alone, on so many images.
RANKING_IMAGES = 16
# Share of the multiply-accumulates that may stay in float32.
MOST = 0.2
# Instructions that multiply 8-bit numbers and add them up in 32 bits: of x86, and of ARM.
_DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})


@dataclass(frozen=True, eq=False)
class Int8:
    """How an export quantises, and what it checks: `ss.export(..., quantize=Int8(batches, max_drop=0.5))`.

    Attributes:
        calibration: batches of images as the network takes them, or pairs of images and labels, which are not used.
            Some hundred that look like those to come; their values decide the ranges of the 8-bit numbers.
        labelled: pairs of images and labels to measure the accuracy on; a list or a loader, because they are read
            several times. None: every fifth of the images is kept to compare the int8 file with the float32 file.
        max_drop: how many points of top-1 accuracy the int8 file may lose on the labelled images.
        min_agreement: without labels, the share of images in which both files must have the same top class.
        max_output_error: without labels, the largest error of the outputs, relative to their size (root mean square).
        reduce_range: weights of 7 bits, which processors without VNNI need to be exact in ONNX Runtime. None: where
            this processor lacks it; True for a file that goes to such processors.

    >>> Int8([torch.zeros(64, 3, 8, 8)], max_drop=0.5).max_drop
    0.5
    >>> Int8([], max_drop=-1.0)
    Traceback (most recent call last):
    ValueError: max_drop must be a number of points from 0 to 100, got -1.0
    """

    calibration: Iterable[Images]
    labelled: Iterable[Sequence[torch.Tensor]] | None = None
    max_drop: float = 1.0
    min_agreement: float = 0.9
    max_output_error: float = 0.3
    reduce_range: bool | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop <= 100:
            raise ValueError(f"max_drop must be a number of points from 0 to 100, got {self.max_drop!r}")
        for name in ("min_agreement", "max_output_error"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a fraction from 0 to 1, got {getattr(self, name)!r}")
        if isinstance(self.labelled, Iterator):
            raise ValueError("labelled images are read several times; give a list or a loader, not a generator")


@dataclass(frozen=True, kw_only=True)
class Int8Report:
    """How an int8 file compares with the float32 file of the same graph; `str()` of it is a short text.

    Attributes:
        images: that both were compared on.
        top1, float32_top1: shares of right top classes; None without labels.
        agreement: share of images with the same top class; None where the outputs are no scores of classes.
        output_error: root mean square of the difference of all outputs, relative to that of the outputs.
        float32_layers: those left in float32 because they hurt most, in this order.
        float32_macs_fraction: their share of the multiply-accumulates.
        float32_nbytes: size of the float32 file.

    >>> print(Int8Report(images=500, top1=0.75, float32_top1=0.755, agreement=0.97, output_error=0.08,
    ...                  float32_layers=("conv1",), float32_macs_fraction=0.03, float32_nbytes=4_000_000))
    top-1 75.00 %, float32 75.50 % (-0.50 points), same top class in 97.0 % of 500 images, outputs off by 8.0 %
    left in float32 (3.0 % of the MACs): conv1
    """

    images: int
    top1: float | None
    float32_top1: float | None
    agreement: float | None
    output_error: float
    float32_layers: tuple[str, ...]
    float32_macs_fraction: float
    float32_nbytes: int

    @property
    def drop(self) -> float | None:
        """Points of top-1 accuracy that are lost."""
        return None if self.top1 is None or self.float32_top1 is None else 100 * (self.float32_top1 - self.top1)

    def __str__(self) -> str:
        where, parts = f"{self.images:,} images", []
        if self.top1 is not None and self.float32_top1 is not None and self.drop is not None:
            tops = (f"top-1 {100 * self.top1:.2f} %", f"float32 {100 * self.float32_top1:.2f} %")
            parts.append(f"{', '.join(tops)} ({-self.drop:+.2f} points)")
        if self.agreement is not None:
            parts.append(f"same top class in {100 * self.agreement:.1f} % of {where}")
        said = "" if self.agreement is not None else f" on {where}"
        parts.append(f"outputs off by {100 * self.output_error:.1f} %{said}")
        kept = ", ".join(self.float32_layers)
        lines = [", ".join(parts)]
        if kept:
            lines.append(f"left in float32 ({100 * self.float32_macs_fraction:.1f} % of the MACs): {kept}")
        return "\n".join(lines)


class Int8TooInaccurate(ValueError):
    """An int8 file that stays within the limits cannot be made."""


@dataclass(eq=False, kw_only=True)
class Int8Writer:
    """Writes a network in float32, then in its place in int8, with as many layers in int8 as the limits allow."""

    exporter: GraphExporter
    options: Int8
    graph: onnx.ModelProto | None = None

    @classmethod
    def of(cls, exporter: Exporter, quantize: Int8 | Iterable[Images], *, format: str) -> Int8Writer:
        """The writer of a format, or a `ValueError` if it has no int8 files."""
        if not isinstance(exporter, GraphExporter):
            raise ValueError(f"a file of the format {format} cannot be quantised; use format='onnx' or 'openvino'")
        return cls(exporter=exporter, options=quantize if isinstance(quantize, Int8) else Int8(quantize))

    def write_float32(self, program: InferenceProgram, path: Path) -> None:
        """Write the graph that will be quantised."""
        self.graph = onnx_model(program)
        self.exporter.write_graph(copy_of(self.graph), path)

    def write_int8(self, batch: ExampleBatch, path: Path) -> Int8Report:
        """Replace the float32 file by an int8 one that passes the check.

        Layers that hurt most are left in float32, one by one, until it does.

        Raises:
            Int8TooInaccurate: it does not with a fifth of the multiply-accumulates in float32.
        """
        assert self.graph is not None, "write_float32 comes first"
        options, images = self.options, _all_images(self.options.calibration, batch)
        if options.labelled is None:
            is_held_out = torch.arange(len(images)) % HELD_OUT == 0
            images, checked = images[~is_held_out], [(images[is_held_out],)]
        check = _Check(
            batches=checked if options.labelled is None else options.labelled,
            batch=batch,
            float32=self.exporter.load(path),
        )
        float32_nbytes = sum(file.stat().st_size for file in path.parent.iterdir())
        reduce_range = needs_reduced_range(options.reduce_range)
        graph = Int8Graph.calibrated(self.graph, images, batch, reduce_range=reduce_range)

        def measured(layers: tuple[str, ...]) -> Int8Report:
            for file in path.parent.iterdir():
                file.unlink()
            self.exporter.write_graph(graph.quantised(float32_layers=layers), path)
            return check.report(
                self.exporter.load(path),
                float32_layers=layers,
                float32_macs_fraction=graph.macs_fraction(layers),
                float32_nbytes=float32_nbytes,
            )

        best = report = measured(())
        candidates: Iterator[str] | None = None
        while complaint := _complaint(report, options):
            candidates = candidates or iter(graph.by_harm(check.images(RANKING_IMAGES), batch))
            layers = next(
                (more for layer in candidates if graph.macs_fraction(more := (*report.float32_layers, layer)) <= MOST),
                None,
            )
            if layers is None:
                raise Int8TooInaccurate(
                    f"int8 is too inaccurate: {complaint}, also with {100 * report.float32_macs_fraction:.1f} % of the "
                    f"multiply-accumulates in float32; the best that was reached: {'; '.join(str(best).splitlines())}; "
                    f"{path.name} is not written. Calibrate with more images like those to come, allow a larger loss, "
                    "or export in float32"
                )
            report = measured(layers)
            best = min(best, report, key=lambda each: (each.drop or 0.0, -(each.agreement or 0.0), each.output_error))
        return report


def _complaint(report: Int8Report, options: Int8) -> str:
    """Which limit a file misses; empty if none."""
    # Shares of images are fractions that rounding must not move over a limit.
    if report.drop is not None:
        is_too_much = report.drop > options.max_drop + 1e-9
        return f"it loses {report.drop:.2f} points of top-1, max_drop={options.max_drop:g}" if is_too_much else ""
    if report.agreement is not None and report.agreement < options.min_agreement - 1e-9:
        return (
            f"its top class is that of the float32 file in {100 * report.agreement:.1f} % of the images, "
            f"min_agreement={options.min_agreement:g}"
        )
    if report.output_error > options.max_output_error:
        return f"its outputs are off by {report.output_error:.3f}, max_output_error={options.max_output_error:g}"
    return ""


def needs_reduced_range(asked: bool | None) -> bool:
    """Whether weights get 7 bits; says so where the processor has no instructions for 8-bit numbers."""
    flags = _processor_flags()
    lacks = flags is not None and not flags & _DOT_PRODUCTS
    is_reduced = lacks and platform.machine().lower() in ("x86_64", "amd64") if asked is None else asked
    if lacks:
        logger.warning(
            "this processor has no instructions for 8-bit dot products (VNNI): the int8 file works, but is hardly "
            "faster here%s",
            "; weights get 7 bits, which such processors need" if is_reduced else "",
        )
    return is_reduced


def _processor_flags() -> frozenset[str] | None:
    """What the first processor can do, on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    entries = (line.partition(":") for line in lines)
    return next(
        (frozenset(text.split()) for name, _, text in entries if name.strip().lower() in ("flags", "features")), None
    )


def _all_images(batches: Iterable[Images], batch: ExampleBatch) -> torch.Tensor:
    """All images of the batches, if the network can take them."""
    if len(batch.arguments) != 1 or not batch.arguments[0].is_floating_point():
        raise ValueError("quantize works for networks of one input, the images; wrap the network in a module with one")
    if isinstance(batches, torch.Tensor | str | Mapping) or not isinstance(batches, Iterable):
        raise ValueError(
            f"quantize must be batches of images, such as a list of tensors, or an Int8, got a {type(batches).__name__}"
        )
    parts = [_images_of(each, batch) for each in batches]
    count = sum(map(len, parts))
    if count < FEWEST_IMAGES:
        raise ValueError(
            f"quantize got {count} images to calibrate with; give at least {FEWEST_IMAGES}, better some hundred, that "
            "look like those to come"
        )
    return torch.cat(parts)


def _images_of(given: Images, batch: ExampleBatch) -> torch.Tensor:
    images = given if isinstance(given, torch.Tensor) else given[0]
    wanted = batch.arguments[0]
    if not isinstance(images, torch.Tensor) or images.shape[1:] != wanted.shape[1:]:
        found = tuple(images.shape[1:]) if isinstance(images, torch.Tensor) else type(images).__name__
        raise ValueError(
            f"quantize: the network takes images of shape {tuple(wanted.shape[1:])}, those to calibrate or check with "
            f"are {found}; prepare them as for the network"
        )
    images = images.detach().cpu().to(wanted.dtype)
    if not images.isfinite().all():
        raise ValueError("quantize: an image holds NaN or infinity; leave it out")
    return images


@dataclass(frozen=True, eq=False, kw_only=True)
class _Check:
    """Compares files with the float32 one, on images, with labels or without."""

    batches: Iterable[Sequence[torch.Tensor]]
    batch: ExampleBatch
    float32: Inference

    def images(self, count: int) -> torch.Tensor:
        """The first images."""
        parts: list[torch.Tensor] = []
        for batch in self.batches:
            parts.append(_images_of(batch, self.batch))
            if sum(map(len, parts)) >= count:
                break
        return torch.cat(parts)[:count]

    @cached_property
    def expected(self) -> list[list[torch.Tensor]]:
        """The outputs of the float32 file for every call."""
        outputs = []
        for images, _ in self._calls():
            outputs.append(list(self.float32(images)))
            if not all(each.isfinite().all() for each in outputs[-1] if each.is_floating_point()):
                raise ValueError(
                    "quantize: the network gives NaN or infinity for images to check with, so it cannot be quantised; "
                    "look for the layer in which the activations overflow"
                )
        if not outputs:
            fixed = "" if self.batch.is_dynamic else f"; the file takes batches of {self.batch.sizes[0]}: give more"
            raise ValueError(f"quantize: there are no images to check with{fixed}")
        return outputs

    def _calls(self) -> Iterator[tuple[Arguments, torch.Tensor | None]]:
        for batch in self.batches:
            if isinstance(batch, torch.Tensor):
                raise ValueError("labelled must be pairs of images and labels, got images alone")
            images = _images_of(batch, self.batch)
            labels = batch[1].cpu() if len(batch) > 1 else None
            start = 0
            for arguments in steps(images, self.batch):
                stop = start + len(arguments[0])
                yield arguments, None if labels is None else labels[start:stop]
                start = stop

    def report(self, run: Inference, **facts: Any) -> Int8Report:
        """How a file compares."""
        images = same = hits = float32_hits = 0
        wrong = size = 0.0
        expected = self.expected
        is_scores = len(expected[0]) == 1 and expected[0][0].dim() == 2 and expected[0][0].shape[1] > 1
        has_labels = False
        for (arguments, labels), wanted in zip(self._calls(), expected, strict=True):
            found = list(run(arguments))
            for ours, theirs in zip(found, wanted, strict=True):
                wrong += float((ours.double() - theirs.double()).square().sum())
                size += float(theirs.double().square().sum())
            images += len(arguments[0])
            if not is_scores:
                if labels is not None:
                    raise ValueError(
                        "quantize: labelled images need a network with one output, the scores of the classes; leave "
                        "labelled out to compare the outputs"
                    )
                continue
            guess, float32_guess = found[0].argmax(1), wanted[0].argmax(1)
            same += int((guess == float32_guess).sum())
            if labels is not None:
                has_labels = True
                hits += int((guess == labels).sum())
                float32_hits += int((float32_guess == labels).sum())
        error = math.sqrt(wrong / size) if size else 0.0 if not wrong else math.inf
        return Int8Report(
            images=images,
            top1=hits / images if has_labels else None,
            float32_top1=float32_hits / images if has_labels else None,
            agreement=same / images if is_scores else None,
            output_error=error,
            **facts,
        )
