"""A network compressed without training at several targets: what each keeps, and how long its file takes."""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from strucspars.bench.deployed import DeployedNetwork, deployed_networks
from strucspars.bench.results import Ratio
from strucspars.convert.compress import compress
from strucspars.convert.conversion import convert_
from strucspars.core.plan import GroupingPlan, Preprocessing
from strucspars.cost.text_table import Column, percent, text_table
from strucspars.data.batches import Batch
from strucspars.nn.groupable import select_layers
from strucspars.nn.names import copied
from strucspars.sparsify.calibration import OnProgress, ignore_progress
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.one_shot import one_shot_plans
from strucspars.sparsify.planning import kept_fraction

DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class SweptTarget:
    """One target: the plan's numbers and the file's; the target None is the dense network.

    Attributes:
        kept_norm: share of the norm of all layers that can be grouped.
        predicted_divergence: nats per image; None without calibration images.
        expected_ms: of the plan, or of the dense network; None unless the budget counts milliseconds.
    """

    target: float | None
    removed_params: float
    removed_macs: float
    kept_norm: float
    predicted_divergence: float | None
    expected_ms: float | None
    deployed: DeployedNetwork
    speedup: Ratio


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A network over several targets, the dense one first. `str()` of it is a table."""

    network: str
    budget: str
    rows: tuple[SweptTarget, ...]
    images: int

    def __str__(self) -> str:
        rows = self.rows
        columns = [
            Column("target", [DENSE if row.target is None else f"{100 * row.target:g}%" for row in rows], is_text=True),
            Column("params removed", [percent(row.removed_params) for row in rows]),
            Column("MACs removed", [percent(row.removed_macs) for row in rows]),
            Column("norm kept", [percent(row.kept_norm) for row in rows]),
        ]
        if any(row.predicted_divergence is not None for row in rows):
            predicted = ["" if row.predicted_divergence is None else f"{row.predicted_divergence:.3f}" for row in rows]
            columns.append(Column("predicted nats", predicted))
        if self.images:
            columns.append(Column(f"top-1 on {self.images:,}", [percent(row.deployed.top1) for row in rows]))
        if any(row.expected_ms is not None for row in rows):
            expected = ["" if row.expected_ms is None else f"{row.expected_ms:.2f}" for row in rows]
            columns.append(Column("ms expected", expected))
        speeds = [f"{row.speedup.median:.2f} x ({row.speedup.low:.2f} to {row.speedup.high:.2f})" for row in rows]
        columns += [
            Column("ms", [f"{row.deployed.ms:.2f}" for row in rows]),
            Column("as fast", ["" if row.target is None else speed for row, speed in zip(rows, speeds, strict=True)]),
            Column("MB", [f"{row.deployed.file_bytes / 1e6:.2f}" for row in rows]),
        ]
        return text_table(columns)


def sweep(
    dense: nn.Module,
    targets: Sequence[float],
    config: SparsifyConfig,
    *,
    name: str,
    image_shape: tuple[int, int, int],
    calibration: Sequence[torch.Tensor] | None = None,
    preprocessing: Preprocessing | None = None,
    batches: Iterable[Batch] = (),
    on_progress: OnProgress = ignore_progress,
) -> Sweep:
    """Compress a network at every target, time the ONNX files in turn on one core, and score them.

    With calibration images the layers are measured once for all targets, and every network is refitted; without, the
    groups follow the norms of the weights. The dense network does not change.
    """
    example = torch.zeros(1, *image_shape)
    plans = one_shot_plans(
        dense, config, targets, calibration=calibration, example_inputs=example, on_progress=on_progress
    )
    models: dict[str, nn.Module] = {DENSE: dense}
    for target, plan in zip(targets, plans, strict=True):
        small = copied(dense)
        if calibration is None:
            convert_(small, plan)
        else:
            compress(small, plan, calibration=calibration, on_progress=on_progress)
        models[f"{target:g}"] = small
    with tempfile.TemporaryDirectory(prefix="strucspars-sweep-") as folder:
        found = deployed_networks(
            {form: (model, Path(folder) / f"{form}.onnx") for form, model in models.items()},
            image_shape=image_shape,
            preprocessing=preprocessing,
            batches=batches,
            on_progress=lambda what, done: on_progress(what, round(100 * done), 100),
        )
    layers = select_layers(dense, config).layers
    latency = plans[0].latency
    dense_row = _row(None, None, 1.0, *found.networks[DENSE])
    rows = [dense_row if latency is None else replace(dense_row, expected_ms=latency.dense_ms)]
    for target, plan in zip(targets, plans, strict=True):
        rows.append(_row(target, plan, kept_fraction(layers, plan), *found.networks[f"{target:g}"]))
    return Sweep(network=name, budget=config.budget, rows=tuple(rows), images=found.images)


def _row(
    target: float | None, plan: GroupingPlan | None, kept_norm: float, deployed: DeployedNetwork, speedup: Ratio
) -> SweptTarget:
    return SweptTarget(
        target=target,
        removed_params=0.0 if plan is None else plan.removed_param_fraction,
        removed_macs=0.0 if plan is None else plan.removed_mac_fraction or 0.0,
        kept_norm=kept_norm,
        predicted_divergence=None if plan is None else plan.predicted_divergence,
        expected_ms=None if plan is None or plan.latency is None else plan.latency.expected_ms,
        deployed=deployed,
        speedup=speedup,
    )
