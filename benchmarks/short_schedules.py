"""Sparse training on short schedules: is the target met, and is it better than grouping in one shot?

    python benchmarks/short_schedules.py WEIGHTS CIFAR10 --schedules 3x16 10x16 3x100 30x16
    python benchmarks/short_schedules.py WEIGHTS CIFAR10 --schedules 3x782 10x782 30x782 --batch 64 --device cuda

A trained ResNet-20 (akamaster's `resnet20-12fca82f.th`) on 10,000 images of CIFAR-10. Each cell: so many epochs x
steps of sparse training at a constant rate, the conversion, and half as many steps of finetuning at a falling rate;
against it the same target in one shot, finetuned for as many steps in all. Both score 2,000 test images. Results are
written after every cell, and cells that the file has already are not run again. Beside the JSON stands a table.
"""

import argparse
import itertools
import json
import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from environment import ROOT, describe
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.cost.text_table import Column, markdown_table
from strucspars.data.cifar import CIFAR10, read_cifar
from strucspars.models.cifar import CifarResNet, ZeroPaddedShortcut

RATES = {"SGD": (0.01, 0.03), "AdamW": (3e-4, 1e-3)}
TARGETS = (0.3, 0.6)
SCHEDULES = ("3x16", "10x16", "3x100", "30x16", "10x100", "30x100", "3x782", "10x782", "30x782")
TRAIN_IMAGES, TEST_IMAGES = 10_000, 2_000
# With these the weights were trained.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Cell:
    """What is varied."""

    schedule: str
    optimizer: str
    lr: float
    target: float

    @property
    def epochs(self) -> int:
        """Of sparse training."""
        return int(self.schedule.split("x")[0])

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return int(self.schedule.split("x")[1])

    @property
    def finetuning(self) -> int:
        """Steps after the conversion."""
        return math.ceil(self.epochs * self.steps / 2)


class CentredShortcut(nn.Module):
    """The shortcut of the network that the weights belong to: zero channels on both sides, not behind."""

    def __init__(self, shortcut: ZeroPaddedShortcut) -> None:
        super().__init__()
        self.side, self.stride = shortcut.extra_channels // 2, shortcut.stride

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The input, smaller and with more channels."""
        return functional.pad(features[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.side, self.side))


class Workplace:
    """The trained network and the images."""

    def __init__(self, weights: Path, root: Path, *, batch: int, device: str) -> None:
        state = torch.load(weights, map_location="cpu", weights_only=True)["state_dict"]
        self._state = {name.removeprefix("module.").replace("linear.", "fc."): value for name, value in state.items()}
        data = read_cifar(root, CIFAR10)
        self._batch, self._device = batch, torch.device(device)
        self._images = self._normalised(data.train.images[:TRAIN_IMAGES])
        self._labels = data.train.labels[:TRAIN_IMAGES].to(self._device)
        self._test_images = self._normalised(data.test.images[:TEST_IMAGES])
        self._test_labels = data.test.labels[:TEST_IMAGES].to(self._device)
        self._generator = torch.Generator()

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
        return ((images.float() / 255 - mean) / deviation).to(self._device)

    def network(self) -> nn.Module:
        """The trained network, ready for the same batches as every other."""
        self._generator.manual_seed(0)
        model = CifarResNet(20)
        model.load_state_dict(self._state)
        for name, module in list(model.named_modules()):
            if isinstance(module, ZeroPaddedShortcut):
                model.set_submodule(name, CentredShortcut(module))
        return model.to(self._device).to(memory_format=torch.channels_last)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """One step on images drawn with replacement, flipped and shifted."""
        drawn = torch.randint(TRAIN_IMAGES, (self._batch,), generator=self._generator)
        flip, (down, right) = (
            torch.rand(self._batch, 1, 1, 1, generator=self._generator) < 0.5,
            torch.randint(0, 9, (2,), generator=self._generator).tolist(),
        )
        images = self._images[drawn]
        images = functional.pad(torch.where(flip.to(self._device), images.flip(3), images), (4, 4, 4, 4))
        images = images[:, :, down : down + 32, right : right + 32].contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model.train()(images), self._labels[drawn]))
        optimizer.step()

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Percentage of the test images."""
        model.eval()
        right = [
            (model(images.contiguous(memory_format=torch.channels_last)).argmax(1) == labels).sum()
            for images, labels in zip(
                torch.split(self._test_images, 250), torch.split(self._test_labels, 250), strict=True
            )
        ]
        return 100 * float(torch.stack(right).sum()) / TEST_IMAGES

    def finetune(self, model: nn.Module, cell: Cell, steps: int) -> float:
        """Train at a falling rate; returns the accuracy."""
        optimizer = optimizer_of(model, cell)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            self.step(model, optimizer)
            schedule.step()
        return self.accuracy(model)


def optimizer_of(model: nn.Module, cell: Cell) -> torch.optim.Optimizer:
    """The optimizer of both stages."""
    if cell.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=cell.lr, momentum=0.9, weight_decay=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=cell.lr)


class Warnings(logging.Handler):
    """Collects what the library warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the beginning, which names the kind."""
        self.texts.append(record.getMessage().split(":")[0].split(";")[0])


def measured(cell: Cell, place: Workplace) -> dict[str, Any]:
    """Both ways of one cell."""
    begin, warnings = time.perf_counter(), Warnings()
    model = place.network()
    optimizer = optimizer_of(model, cell)
    logging.getLogger("strucspars.sparsify.advice").addHandler(warnings)
    sparsifier = ss.Sparsifier(model, ss.SparsifyConfig(target=cell.target, epochs=cell.epochs)).attach(optimizer)
    reports = []
    for _ in range(cell.epochs):
        for _ in range(cell.steps):
            place.step(model, optimizer)
        reports.append(sparsifier.end_epoch())
    logging.getLogger("strucspars.sparsify.advice").removeHandler(warnings)
    plan = sparsifier.plan()
    ss.convert_(model, plan)
    converted = place.accuracy(model)
    sparse = place.finetune(model, cell, cell.finetuning)
    other = place.network()
    ss.convert_(other, ss.one_shot_plan(other, cell.target))
    one_shot = place.finetune(other, cell, cell.epochs * cell.steps + cell.finetuning)
    kept = [report.kept_norm for report in reports]
    return asdict(cell) | {
        "steps": cell.epochs * cell.steps,
        "finetuning_steps": cell.finetuning,
        "removed_fraction": [round(report.removed_fraction, 4) for report in reports],
        "kept_norm": [round(value, 4) for value in kept],
        "lambda": [float(f"{report.lambda_value:.3g}") for report in reports],
        "largest_fall_of_kept_norm": round(max(0.0, *(a - b for a, b in itertools.pairwise(kept))), 4),
        "plan_min_kept_norm": plan.min_kept_norm,
        "accuracy": {"converted": converted, "sparse_training": sparse, "one_shot": one_shot},
        "warnings": warnings.texts,
        "seconds": round(time.perf_counter() - begin),
    }


def markdown(report: dict[str, Any]) -> str:
    """The table of all cells."""
    environment = report["environment"]
    hardware = environment["hardware"]
    cells = sorted(report["cells"], key=lambda cell: SCHEDULES.index(cell["schedule"]))
    columns = [
        Column("epochs x steps", [cell["schedule"] for cell in cells], is_text=True),
        Column("optimizer", [cell["optimizer"] for cell in cells], is_text=True),
        Column("rate", [f"{cell['lr']:g}" for cell in cells]),
        Column("target %", [f"{100 * cell['target']:.0f}" for cell in cells]),
        Column("removed %", [f"{100 * cell['removed_fraction'][-1]:.1f}" for cell in cells]),
        Column("kept norm", [f"{cell['kept_norm'][-1]:.2f}" for cell in cells]),
        Column("converted", [f"{cell['accuracy']['converted']:.1f}" for cell in cells]),
        Column("finetuned", [f"{cell['accuracy']['sparse_training']:.1f}" for cell in cells]),
        Column("one-shot, finetuned", [f"{cell['accuracy']['one_shot']:.1f}" for cell in cells]),
    ]
    return f"""# Sparse training on short schedules

A trained ResNet-20 ({report["dense_accuracy"]:.1f} %) on a subset of CIFAR-10, batches of {environment["batch"]};
one run per row, on one core of a machine with {hardware["cores"]} ({hardware["cpu"]}), by
`{environment["command"]}`.
*Removed* and *kept norm* are those at the end of sparse training, before the plan searches its threshold; *converted*
and *finetuned* are accuracies in percent after the conversion, and after half as many further steps; *one-shot* is
grouped without images and finetuned for as many steps in all. {TEST_IMAGES:,} test images: the standard error of an
accuracy is about one point.

{markdown_table(columns)}
"""


def main() -> None:
    """Measure the cells that are missing, write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="akamaster's resnet20-12fca82f.th")
    parser.add_argument("data", type=Path, help="folder that holds cifar-10-batches-py")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES[:4], help="epochs x steps")
    parser.add_argument("--batch", type=int, default=16, help="images per step")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "short_schedules.json", help="the JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("strucspars").addHandler(logging.NullHandler())
    place = Workplace(options.weights, options.data, batch=options.batch, device=options.device)
    found = json.loads(options.out.read_text()) if options.out.exists() else {"cells": []}
    command = f"python benchmarks/short_schedules.py WEIGHTS CIFAR10 --schedules {' '.join(options.schedules)}"
    environment = describe(("strucspars", "numpy", "torch")) | {"command": command, "batch": options.batch}
    for schedule, optimizer, rate, target in itertools.product(options.schedules, RATES, (0, 1), TARGETS):
        cell = Cell(schedule, optimizer, RATES[optimizer][rate], target)
        if any(asdict(cell).items() <= row.items() for row in found["cells"]):
            continue
        row = measured(cell, place) | {"commit": environment["commit"]}
        found["cells"].append(row)
        found |= {"environment": environment, "dense_accuracy": place.accuracy(place.network())}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(markdown(found))
        print(cell, row["removed_fraction"][-1], row["accuracy"], row["warnings"], row["seconds"], flush=True)


if __name__ == "__main__":
    main()
