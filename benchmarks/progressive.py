"""One progressive training against sparse training and finetuning with the same epochs in all, on the CPU.

    python benchmarks/progressive.py digits RUNS
    python benchmarks/progressive.py cifar10 RUNS --data ~/cifar10
    python benchmarks/progressive.py trained RUNS --data ~/cifar10 --weights resnet20-12fca82f.th

`digits` is the demo's recipe; `cifar10` a small network on every tenth training image of CIFAR-10 and half of the test
images; `trained` a ResNet-20 with akamaster's weights on the same images, which is its own teacher. RUNS is a folder
for the runs, which resume there. Every cell is a recipe in two forms or more, over seeds; the accuracy is that of the
last epoch.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from environment import ROOT, describe
from torch import nn
from torch.nn import functional

from strucspars.data.catalogue import load_data
from strucspars.data.image_set import ImageSet, ResidentData
from strucspars.io.files import write_text
from strucspars.models.cifar import CifarResNet, ZeroPaddedShortcut
from strucspars.train.outcome import read_metrics
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder

OUT = ROOT / "results" / "progressive.json"
STEP_OF_TRAINING, STEP_OF_TEST = 10, 2


def part_of_cifar10(root: str) -> ResidentData:
    """Every tenth image to learn from, every second one to test on."""
    return _part_of_cifar10(root)


def part_for_trained_weights(root: str) -> ResidentData:
    """The same with the normalisation that akamaster's networks know."""
    return replace(_part_of_cifar10(root), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


class CentredShortcut(nn.Module):
    """The shortcut of akamaster's networks: zero channels on both sides, not behind."""

    def __init__(self, extra_channels: int, stride: int) -> None:
        super().__init__()
        self.side, self.stride = extra_channels // 2, stride

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The input, smaller and with more channels."""
        return functional.pad(features[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.side, self.side))


def centred_resnet20(num_classes: int) -> nn.Module:
    """The network of akamaster's weights."""
    model = CifarResNet(20, num_classes)
    for name, module in list(model.named_modules()):
        if isinstance(module, ZeroPaddedShortcut):
            model.set_submodule(name, CentredShortcut(module.extra_channels, module.stride))
    return model


def _part_of_cifar10(root: str) -> ResidentData:
    whole = load_data("cifar10", Path(root))
    assert isinstance(whole, ResidentData)
    parts = [
        ImageSet(images=part.images[::step].clone(), labels=part.labels[::step].clone())
        for part, step in ((whole.train, STEP_OF_TRAINING), (whole.test, STEP_OF_TEST))
    ]
    return ResidentData(
        name="progressive:part_of_cifar10",
        train=parts[0],
        test=parts[1],
        num_classes=whole.num_classes,
        mean=whole.mean,
        std=whole.std,
        augmentation=whole.augmentation,
    )


@dataclass(frozen=True)
class Cell:
    """Runs over seeds that differ in the form of their training."""

    form: str
    recipe: str
    overrides: tuple[str, ...]


def cells(data: str, root: str | None) -> list[Cell]:
    """What is compared, with the same epochs in all."""
    if data == "digits":
        epochs, common = 31, tuple[str, ...]()
        two_stages: tuple[str, ...] = ()
    else:
        epochs = 12
        common = (
            "data.name=progressive:part_of_cifar10",
            f"data.root={root}",
            "model.name=cifar-resnet8",
            "sparsify.target=0.5",
            "sparsify.controller=auto",
            "sparsify.lambda_step=null",
            "stage2.lr=0.1",
            "stage2.weight_decay=5e-4",
        )
        two_stages = ("stage1.epochs=6", "stage2.epochs=6")
    one_stage = (
        *("sparsify.schedule=progressive", "sparsify.controller=auto", "sparsify.lambda_step=null"),
        f"stage2.epochs={epochs}",
        # That of the first of two stages.
        "stage2.lr=0.1",
    )
    return [
        Cell("dense", "demo-dense", (*common, f"stage2.epochs={epochs}")),
        Cell("two stages", "demo", (*common, *two_stages)),
        Cell("progressive", "demo", (*common, *one_stage)),
        Cell("progressive, cut at once", "demo", (*common, *one_stage, "sparsify.anneal=0")),
    ]


def trained_cells(root: str | None, weights: Path) -> list[Cell]:
    """From trained weights: cut at once and finetuned, or decided at once and annealed."""
    common = (
        *("data.name=progressive:part_for_trained_weights", f"data.root={root}", "data.batch_size=128"),
        *("model.name=progressive:centred_resnet20", f"model.weights={weights}", "finetune.teacher=weights"),
        *("sparsify.target=0.4", "sparsify.controller=auto", "sparsify.lambda_step=null"),
        *("stage1.epochs=0", "stage2.epochs=6", "stage2.lr=0.02"),
    )
    annealed = ("sparsify.schedule=progressive", "sparsify.decide_by=0", "sparsify.anneal=0.5")
    return [
        Cell("one-shot, finetuned", "demo", (*common, "finetune.form=masked")),
        Cell("progressive", "demo", (*common, *annealed)),
    ]


def with_our_names(weights: Path, folder: Path) -> Path:
    """A file of akamaster's weights under the names of our network."""
    state = torch.load(weights, map_location="cpu", weights_only=True)["state_dict"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "resnet20.pth"
    torch.save({name.removeprefix("module.").replace("linear.", "fc."): value for name, value in state.items()}, path)
    return path


def measured(cell: Cell, seed: int, folder: Path) -> dict[str, Any]:
    """What one run came to."""
    summary = run_pipeline(read_recipe(cell.recipe, [*cell.overrides, f"seed={seed}"]), folder)
    rows = read_metrics(RunFolder(folder))
    return {
        "form": cell.form,
        "seed": seed,
        "epochs": sum("lr" in row for row in rows),
        "removed": round(summary.removed_param_fraction, 4),
        "top1": summary.finetuned.last_top1,
        "test_loss": round(rows[-1]["test_loss"], 4),
        "seconds": round(sum(summary.seconds.values())),
    }


def main() -> None:
    """Measure, and write what is known so far after every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=["digits", "cifar10", "trained"])
    parser.add_argument("runs", type=Path, help="folder for the runs")
    parser.add_argument("--data", dest="root", help="folder of CIFAR-10")
    parser.add_argument("--weights", type=Path, help="akamaster's resnet20-12fca82f.th")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--forms", nargs="+", help="only these of the forms")
    arguments = parser.parse_args()
    report: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    rows: list[dict[str, Any]] = []
    if arguments.data == "trained":
        compared = trained_cells(arguments.root, with_our_names(arguments.weights, arguments.runs))
    else:
        compared = cells(arguments.data, arguments.root)
    for seed in range(arguments.seeds):
        for cell in compared:
            if arguments.forms and cell.form not in arguments.forms:
                continue
            name = f"{arguments.data}-{cell.form.replace(', ', '-').replace(' ', '-')}-{seed}"
            rows.append(measured(cell, seed, arguments.runs / name))
            print(rows[-1], flush=True)
            report[arguments.data] = describe(("torch",)) | {"runs": rows, "mean_top1": means(rows)}
            write_text(OUT, json.dumps(report, indent=2) + "\n")


def means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """Mean and deviation of the accuracy, by form."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["form"], []).append(row["top1"])
    return {
        form: {"mean": mean(values), "deviation": stdev(values) if len(values) > 1 else None, "runs": len(values)}
        for form, values in found.items()
    }


if __name__ == "__main__":
    main()
