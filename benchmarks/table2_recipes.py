"""The paper's ImageNet recipes on generated images: all run from end to end, and have the paper's sizes.

    python benchmarks/table2_recipes.py                              # Table 2, into results/
    python benchmarks/table2_recipes.py --ablations                  # and Table 3
    python benchmarks/table2_recipes.py --only imagenet-resnet50-65  # these only, nothing written

As many classes as ImageNet has, one small image each to learn from and one to be tested on. A recipe trains one epoch
per stage, in a process and a folder of its own that is gone afterwards; folders take up to 1 GB below TMPDIR.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import ROOT, describe
from PIL import Image

from strucspars.core.plan import GroupingPlan
from strucspars.cost.counting import NetworkCount, count_macs
from strucspars.models.catalogue import build_model
from strucspars.paper.published import PAPER_ROWS
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder

NUM_CLASSES = 1000
SMALL_SIZE = 32
# All else is the recipes' own: target, batches, rates, schedules, and the data set's name.
OVERRIDES = (
    f"data.image_size={SMALL_SIZE}",
    "data.workers=0",
    "stage1.epochs=1",
    "stage2.epochs=1",
    "finetune.form=grouped",
    "engine.device=cpu",
)
# Of the dense network's parameters, and of its FLOPs: the paper has two or three digits.
PARAM_TOLERANCE = 0.01
DENSE_FLOPS_TOLERANCE = 0.005
JSON_PATH = ROOT / "results" / "table2_recipes.json"
PAGE_PATH = JSON_PATH.with_suffix(".md")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A recipe that ran.

    Attributes:
        recipe, table: what the paper calls it, and where.
        target: removed fraction of all parameters that the recipe asks for; None for a dense one.
        dense_params: of the network before compression.
        params: of the network that the run saved.
        macs: of convolutions and linear layers with the groups of the run, one image of the recipe's own size.
        flops: the same as the paper counts; see `NetworkCount.paper_flops`.
        paper_params, paper_flops: the paper's.
        grouped_layers: how many have more than one group.
        stages: what the run's metrics have, in order.
        train_losses: of the stages that trained.
        seconds: the run from end to end.
    """

    recipe: str
    table: int
    target: float | None
    dense_params: int
    params: int
    macs: int
    flops: int
    paper_params: float
    paper_flops: float
    grouped_layers: int
    stages: list[str]
    train_losses: list[float]
    seconds: float


def write_image_folder(root: Path, *, num_classes: int, train_images: int = 1, test_images: int = 1) -> None:
    """Write `root/train/CLASS/` and `root/val/CLASS/`: noise over a gradient whose colour is the class's own.

    Args:
        root: a folder.
        num_classes: folders per split.
        train_images: per class.
        test_images: per class.
    """
    generator = np.random.default_rng(0)
    colours = generator.uniform(0.2, 1.0, size=(num_classes, 3))
    for split, count in (("train", train_images), ("val", test_images)):
        for label, colour in enumerate(colours):
            folder = root / split / f"class{label:04d}"
            folder.mkdir(parents=True)
            for number in range(count):
                _noisy_gradient(colour, generator).save(folder / f"{number}.png")


def _noisy_gradient(colour: np.ndarray[Any, Any], generator: np.random.Generator) -> Image.Image:
    """Neither square nor of the size that recipes ask for, so that resizing and cropping have something to do."""
    height, width = 40, 48
    gradient = np.linspace(0.2, 1.0, width)[None, :, None] * colour
    pixels = 200 * gradient + generator.integers(0, 56, size=(height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def reduced_recipe(name: str, images: Path) -> Recipe:
    """A recipe for 1 + 1 epochs of small images."""
    return read_recipe(name, [*OVERRIDES, f"data.root={images}"])


def full_size_count(name: str, plan: GroupingPlan | None) -> NetworkCount:
    """The recipe's network with the groups of a plan, at the image size of the paper; nothing is computed."""
    recipe = read_recipe(name)
    with torch.device("meta"):
        model = build_model(recipe.model.name, num_classes=NUM_CLASSES)
        return count_macs(model, torch.empty(1, 3, recipe.data.image_size, recipe.data.image_size), plan)


def ran(name: str, images: Path) -> Row:
    """Run a recipe and compare its network with the paper's."""
    paper = PAPER_ROWS[name]
    with tempfile.TemporaryDirectory(prefix="table2-") as place:
        folder = RunFolder(Path(place) / name)
        begin = time.perf_counter()
        summary = run_pipeline(reduced_recipe(name, images), folder.path)
        seconds = time.perf_counter() - begin
        plan, metrics = folder.load_plan(), folder.metrics()
    count = full_size_count(name, plan)
    if count.params != summary.params.after:
        raise ValueError(f"{name}: the plan leaves {count.params} parameters, the saved network has {summary.params}")
    return Row(
        recipe=name,
        table=paper.table,
        target=summary.target,
        dense_params=summary.params.before,
        params=summary.params.after,
        macs=count.macs,
        flops=count.paper_flops,
        paper_params=paper.params,
        paper_flops=paper.flops,
        grouped_layers=0 if plan is None else sum(layer.num_groups > 1 for layer in plan.layers.values()),
        stages=[row["stage"] for row in metrics],
        train_losses=[row["train_loss"] for row in metrics if "train_loss" in row],
        seconds=round(seconds, 1),
    )


def ran_apart(name: str, images: Path) -> Row | str:
    """Run a recipe in a process of its own, which gives all its memory back; the reason where it fails."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(ran, name, images).result()
        except Exception as error:  # on any error, the other recipes still run
            return f"{type(error).__name__}: {' '.join(str(error).split())}"


def differs(row: dict[str, Any]) -> bool:
    """Whether parameters, or the FLOPs of a dense network, are not the paper's."""
    params_differ: bool = abs(row["params"] - row["paper_params"]) > PARAM_TOLERANCE * row["dense_params"]
    flops_differ: bool = abs(row["flops"] / row["paper_flops"] - 1) > DENSE_FLOPS_TOLERANCE
    return params_differ or (row["target"] is None and flops_differ)


def markdown(report: dict[str, Any]) -> str:
    """The page, from the report alone."""
    environment, rows = report["environment"], report["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    hardware = f"{environment['hardware']['cpu']}, {report['threads']} thread(s)"
    return "\n".join(
        [
            "# The recipes of Table 2, on generated images",
            "",
            f"Generated by `{environment['command']}` at commit {environment['commit']} ({hardware}; {versions}). "
            "Do not edit.",
            "",
            "Every recipe of the table ran once from end to end: stage 1, compression, stage 2, evaluation, saving "
            f"(the dense ones stage 2 only), one epoch each, on {report['num_classes']} generated images of as many "
            f"classes. Changed against the recipes: `{' '.join(report['overrides'])}`. Accuracies on noise mean "
            "nothing and are left out. It shows that the recipes run and what size their networks get, not what they "
            "learn; lambda rises after the first epoch only, so that the penalty has no weight yet.",
            "",
            *_table(rows),
            "",
            "- *Params* are those of the saved network, in millions.",
            "- *GMACs* are the multiply-accumulates of convolutions and linear layers for one image of 224 x 224, with "
            "the groups that the run has found; *GFLOPs* the same in the paper's count, which adds 4 for every element "
            "of a batch norm. That is the column to hold against the paper's.",
            f"- Parameters must differ by less than {100 * PARAM_TOLERANCE:.0f} point of the dense network, the GFLOPs "
            f"of dense networks by less than {100 * DENSE_FLOPS_TOLERANCE:.1f} %. "
            f"Not so: {', '.join(row['recipe'] for row in rows if differs(row)) or 'none'}.",
            "- GFLOPs of compressed networks are only indicative. The target fixes how many parameters go, not from "
            "which layers, and a parameter of an early layer, where images are large, takes more operations with it "
            "than one of a late layer. After one epoch on noise, groups are spread over the layers about as the "
            "initial weights have it, not as in a trained network.",
            "- *Layers* have more than one group. *Ran* are the epochs of the two stages, *seconds* the whole run.",
            *(f"- FAILED: `{name}`: {reason}" for name, reason in report["failures"].items()),
            "",
        ]
    )


def _table(rows: Iterable[dict[str, Any]]) -> list[str]:
    columns = "recipe | target | params | paper | GMACs | GFLOPs | paper | layers | ran | seconds"
    return [f"| {columns} |", "| --- |" + " ---: |" * 7 + " --- | ---: |", *(_line(row) for row in rows)]


def _line(row: dict[str, Any]) -> str:
    target = "dense" if row["target"] is None else f"-{row['target']:.1%}"
    params = f"{row['params'] / 1e6:.1f} | {row['paper_params'] / 1e6:.1f}"
    flops = f"{row['macs'] / 1e9:.2f} | {row['flops'] / 1e9:.2f} | {row['paper_flops'] / 1e9:.2f}"
    epochs = " + ".join("1" for stage in row["stages"] if stage != "compress")
    return (
        f"| {row['recipe']} | {target} | {params} | {flops} | {row['grouped_layers']} | {epochs} | "
        f"{row['seconds']:.0f} |"
    )


def _wanted(*, only: list[str] | None, ablations: bool) -> list[str]:
    tables = {name: row.table for name, row in PAPER_ROWS.items() if row.table in (2, 3)}
    unknown = [name for name in only or () if name not in tables]
    if unknown:
        sys.exit(f"not in Table 2 or 3: {', '.join(unknown)}; there are {', '.join(tables)}")
    return only or [name for name, table in tables.items() if table == 2 or ablations]


def main() -> None:
    """Run the recipes one after the other, a line each, then write the page and its data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of recipes; nothing is written")
    parser.add_argument("--ablations", action="store_true", help="the networks of Table 3 too")
    arguments = parser.parse_args()
    environment = describe(("strucspars", "torch", "torchvision"))  # now: the tree may change while this runs
    rows, failures = [], {}
    with tempfile.TemporaryDirectory(prefix="table2-images-") as images:
        write_image_folder(Path(images), num_classes=NUM_CLASSES)
        for name in _wanted(only=arguments.only, ablations=arguments.ablations):
            outcome = ran_apart(name, Path(images))
            print(f"{name}: {outcome}", file=sys.stderr, flush=True)
            if isinstance(outcome, Row):
                rows.append(asdict(outcome))
            else:
                failures[name] = outcome
    report = {
        "environment": environment,
        "threads": torch.get_num_threads(),
        "num_classes": NUM_CLASSES,
        "overrides": list(OVERRIDES),
        "rows": rows,
        "failures": failures,
    }
    if arguments.only:
        print(markdown(report))
    else:
        JSON_PATH.write_text(json.dumps(report, indent=1) + "\n")
        PAGE_PATH.write_text(markdown(report))
    bad = [*failures, *(row["recipe"] for row in rows if differs(row))]
    sys.exit(f"failed, or of another size than the paper's: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
