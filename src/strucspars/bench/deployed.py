"""A dense and a compressed network compared as ONNX files: size, speed in ONNX Runtime, accuracy on labelled images."""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from strucspars.bench.results import Ratio
from strucspars.bench.suite import OnProgress, TimingRules, interleaved_times, paired_ratio, quartiles
from strucspars.convert.comparison import random_image
from strucspars.core.plan import PlannedLatency, Preprocessing
from strucspars.cost.counting import count_macs
from strucspars.cost.text_table import Column, percent, text_table
from strucspars.data.batches import Batch
from strucspars.export.checked import export
from strucspars.export.onnx import OnnxRunner

FORMS = ("dense", "compressed")
# A small sitting: half a minute for both networks together.
SITTING = TimingRules(seconds=20.0, max_rounds=30)


@dataclass(frozen=True, kw_only=True)
class DeployedNetwork:
    """One network as a file; `top1` is None without labelled images, or if it was never trained for them."""

    top1: float | None
    params: int
    macs: int
    file_bytes: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class DeployedPair:
    """What compression has won and lost; the speed-up is within the same rounds. `str()` of it is a table.

    `expected` is what the plan expected, where it counted milliseconds.
    """

    dense: DeployedNetwork
    compressed: DeployedNetwork
    speedup: Ratio
    images: int
    path: Path
    expected: PlannedLatency | None = None

    def __str__(self) -> str:
        dense, small, speed = self.dense, self.compressed, self.speedup
        faster = f"{speed.median:.2f} x as fast ({speed.low:.2f} to {speed.high:.2f})"
        rows = [
            _row("parameters", "{:,}", dense.params, small.params),
            _row("MACs", "{:,}", dense.macs, small.macs),
            _row("ONNX file, MB", "{:.2f}", dense.file_bytes / 1e6, small.file_bytes / 1e6),
            ("ms per image", f"{dense.ms:.2f}", f"{small.ms:.2f}", faster),
        ]
        if self.expected is not None:
            planned = self.expected
            rows.append(("ms expected", f"{planned.dense_ms:.2f}", f"{planned.expected_ms:.2f}", planned.runtime))
        if self.images:
            both = None if dense.top1 is None or small.top1 is None else 100 * (small.top1 - dense.top1)
            points = "" if both is None else f"{both:+.2f} points"
            top1 = [percent(each.top1) or "not trained for these" for each in (dense, small)]
            rows.insert(0, (f"top-1 on {self.images:,} images", *top1, points))
        columns = zip(("", *FORMS, "change"), zip(*rows, strict=True), strict=True)
        return text_table([Column(title, cells, is_text=not title) for title, cells in columns])


def deployed_pair(
    dense: nn.Module,
    compressed: nn.Module,
    path: Path,
    *,
    image_shape: tuple[int, int, int],
    preprocessing: Preprocessing | None = None,
    batches: Iterable[Batch] = (),
    is_dense_trained: bool = True,
    expected: PlannedLatency | None = None,
    rules: TimingRules = SITTING,
    on_progress: OnProgress = lambda words, done: None,
) -> DeployedPair:
    """Export both networks to ONNX, time the files in turn, and score them on labelled images.

    The compressed network is written to `path`; the file of the dense one is temporary. A dense network that was never
    trained for these labels, with `is_dense_trained=False`, is not scored.
    """
    with tempfile.TemporaryDirectory(prefix="strucspars-dense-") as folder:
        found = deployed_networks(
            {"dense": (dense, Path(folder) / "dense.onnx"), "compressed": (compressed, path)},
            image_shape=image_shape,
            preprocessing=preprocessing,
            batches=batches,
            scored=FORMS if is_dense_trained else FORMS[1:],
            rules=rules,
            on_progress=on_progress,
        )
    (before, _), (after, speedup) = (found.networks[form] for form in FORMS)
    return DeployedPair(
        dense=before, compressed=after, speedup=speedup, images=found.images, path=path, expected=expected
    )


@dataclass(frozen=True, kw_only=True)
class DeployedNetworks:
    """Networks as files, each with its speed-up over the first, and on how many images they were scored."""

    networks: Mapping[str, tuple[DeployedNetwork, Ratio]]
    images: int


def deployed_networks(
    forms: Mapping[str, tuple[nn.Module, Path]],
    *,
    image_shape: tuple[int, int, int],
    preprocessing: Preprocessing | None = None,
    batches: Iterable[Batch] = (),
    scored: Sequence[str] | None = None,
    rules: TimingRules = SITTING,
    on_progress: OnProgress = lambda words, done: None,
) -> DeployedNetworks:
    """Export networks to the ONNX files named beside them, time these in turn, and score those named on images."""
    example, reports = random_image(image_shape), {}
    for form, (model, file) in forms.items():
        on_progress(f"exporting the {form} network", 0.0)
        reports[form] = export(model, file, example_inputs=example, preprocessing=preprocessing)
    image = example[:1].numpy()
    programs = {form: partial(OnnxRunner(file, threads=1), image) for form, (_, file) in forms.items()}
    times = interleaved_times(
        programs, rules, on_round=lambda _, elapsed: on_progress("timing", min(1.0, elapsed / rules.seconds))
    )
    names = list(forms if scored is None else scored)
    # Side by side, with no more threads than cores: those of ONNX Runtime wait by spinning.
    threads = max(1, (os.cpu_count() or 1) // len(names))
    runners = {form: OnnxRunner(forms[form][1], threads=threads) for form in names}
    hits, images = _hits(runners, batches, on_progress)
    (first, *_), networks = forms, {}
    for form, (model, _) in forms.items():
        count = count_macs(model, example[:1])
        deployed = DeployedNetwork(
            top1=hits[form] / images if images and form in hits else None,
            params=count.params,
            macs=count.macs,
            file_bytes=reports[form].nbytes,
            ms=1000 * quartiles(times[form])[1],
        )
        networks[form] = deployed, paired_ratio(times[first], times[form])
    return DeployedNetworks(networks=networks, images=images)


def _hits(
    runners: Mapping[str, OnnxRunner], batches: Iterable[Batch], on_progress: OnProgress
) -> tuple[dict[str, int], int]:
    """How many labels each file guesses, and how many there were."""
    hits, images = dict.fromkeys(runners, 0), 0
    with ThreadPoolExecutor(len(runners)) as pool:
        for batch in batches:
            array = batch.images.numpy()
            running = {form: pool.submit(runner, array) for form, runner in runners.items()}
            for form, scores in running.items():
                guesses = torch.from_numpy(scores.result()[0]).argmax(dim=1)
                hits[form] += int(((guesses == batch.labels) & batch.valid).sum())
            images += int(batch.valid.sum())
            on_progress(f"scoring, {images:,} images", 0.0)
    return hits, images


def _row(title: str, form: str, before: float, after: float) -> tuple[str, ...]:
    change = f"{100 * (after / before - 1):+.1f} %" if before else ""
    return title, form.format(before), form.format(after), change
