"""Trained weights compressed and finetuned, against the dense network finetuned for the same epochs.

    python benchmarks/finetuning.py imagenette RUNS --images FOLDER --weights resnet50.pt --targets 0.5 0.65
    python benchmarks/finetuning.py tiny-imagenet RUNS --images FOLDER --weights resnet18.pt --targets 0.5

FOLDER holds train/ and val/ with a folder of photos per class. `imagenette` is a ResNet-50 with ImageNet weights (those
of 2015: stride in the first 1x1 convolution of a stage) and its 1,000 outputs, of which the photos show ten;
`tiny-imagenet` a ResNet-18 for 64 x 64 photos of 200 classes. The recipes are those of `strucspars compress --epochs`,
in bfloat16 and with the photos in the memory of the device: cut once at 224 x 224, then shifted and mirrored. `--forms`
also compares other ways to remove the weights. Runs resume in RUNS, a folder.
"""

import argparse
import functools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torchvision
from environment import ROOT, describe
from over_runs import read_sittings, with_sitting
from PIL import Image
from torch import nn

from strucspars.core.plan import Preprocessing
from strucspars.data.image_set import Augmentation, ImageSet, ResidentData
from strucspars.train.deploy import TrainedNetwork, finetuning_recipe
from strucspars.train.outcome import RunSummary
from strucspars.train.recipe import EngineRecipe, FinetuneRecipe, Recipe, SparsifyRecipe
from strucspars.train.side_by_side import run_side_by_side
from strucspars.train.solver_pool import default_workers, solver_pool

OUT = ROOT / "results" / "finetuning.json"
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Imagenette's classes as outputs of an ImageNet network.
OUTPUTS = {
    "n01440764": 0,
    "n02102040": 217,
    "n02979186": 482,
    "n03000684": 491,
    "n03028079": 497,
    "n03394916": 566,
    "n03417042": 569,
    "n03425413": 571,
    "n03445777": 574,
    "n03888257": 701,
}


def resnet50(num_classes: int) -> nn.Module:
    """The network of the ImageNet weights."""
    model = torchvision.models.resnet50(weights=None, num_classes=num_classes)
    for layer in (model.layer2, model.layer3, model.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    return cast(nn.Module, model)


def resnet18(num_classes: int) -> nn.Module:
    """The network of the Tiny-ImageNet weights."""
    model: nn.Module = torchvision.models.resnet18(weights=None, num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, 7, stride=1, padding=3, bias=False)
    return model


def imagenette(root: str | None) -> ResidentData:
    """Ten classes of ImageNet, under the numbers of their outputs."""
    return _resident("imagenette", root, size=224, num_classes=1000, padding=16, normalisation=IMAGENET)


def tiny_imagenet(root: str | None) -> ResidentData:
    """200 classes of 64 x 64 photos."""
    half = (0.5, 0.5, 0.5)
    return _resident("tiny_imagenet", root, size=64, num_classes=200, padding=8, normalisation=(half, half))


@functools.cache
def _resident(
    name: str,
    root: str | None,
    *,
    size: int,
    num_classes: int,
    padding: int,
    normalisation: tuple[tuple[float, ...], tuple[float, ...]],
) -> ResidentData:
    folder = Path(root or os.environ["IMAGES"])
    with ProcessPoolExecutor() as pool:
        train, test = (_split(folder / part, size, pool) for part in ("train", "val"))
    return ResidentData(
        name=f"finetuning:{name}",
        train=train,
        test=test,
        num_classes=num_classes,
        mean=normalisation[0],
        std=normalisation[1],
        augmentation=Augmentation(padding=padding, flip=True),
    )


def _split(folder: Path, size: int, pool: ProcessPoolExecutor) -> ImageSet:
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    numbers = {
        name: OUTPUTS.get(name, place) if len(classes) == len(OUTPUTS) else place for place, name in enumerate(classes)
    }
    found = [(path, numbers[name]) for name in classes for path in sorted((folder / name).iterdir())]
    crop = functools.partial(_crop, size=size)
    pixels = np.stack(list(pool.map(crop, [path for path, _ in found], chunksize=64)))
    labels = torch.tensor([number for _, number in found])
    return ImageSet(torch.from_numpy(pixels), labels)


def _crop(path: Path, size: int) -> np.ndarray:
    """The middle of a photo, `(3, size, size)`, of eight sevenths of that at its shorter side where it is larger."""
    photo = Image.open(path).convert("RGB")
    if min(photo.size) > size:
        scale = size * 8 / 7 / min(photo.size)
        photo = photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.Resampling.BILINEAR)
    left, top = (photo.width - size) // 2, (photo.height - size) // 2
    return np.asarray(photo.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


@dataclass(frozen=True)
class Task:
    """Weights, and images to finetune them on."""

    network: str
    data: str
    num_classes: int
    preprocessing: Preprocessing
    epochs: int


TASKS = {
    "imagenette": Task(
        "finetuning:resnet50",
        "finetuning:imagenette",
        1000,
        Preprocessing(mean=IMAGENET[0], std=IMAGENET[1], size=224, resize=256),
        10,
    ),
    "tiny-imagenet": Task(
        "finetuning:resnet18",
        "finetuning:tiny_imagenet",
        200,
        Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=64, resize=None),
        20,
    ),
}
FORMS = ("refitted", "progressive", "one-shot")


def recipes(task: Task, options: argparse.Namespace) -> Iterator[tuple[dict[str, object], Recipe]]:
    """What is compared: each recipe with what sets it apart."""
    size = task.preprocessing.size
    network = TrainedNetwork(
        name=task.network,
        weights=str(options.weights),
        num_classes=task.num_classes,
        preprocessing=task.preprocessing,
        image_shape=(3, size, size),
    )
    engine = EngineRecipe(precision="bf16", channels_last=True, compile=options.compile, device=options.device)
    for target in options.targets:
        base = finetuning_recipe(
            options.task,
            network,
            task.data,
            None,
            epochs=options.epochs or task.epochs,
            sparsify=SparsifyRecipe(target=target),
        )
        base = replace(base, data=replace(base.data, root=str(options.images)), engine=engine)
        for form in ["dense", *options.forms] if target == options.targets[0] else options.forms:
            name = f"{options.task}-{form}" if form == "dense" else f"{options.task}-{target:g}-{form}"
            for seed in options.seeds:
                named = f"{name}-seed{seed}" if seed else name
                facts = {"run": named, "form": form, "target": 0.0 if form == "dense" else target, "seed": seed}
                yield facts, replace(_in_form(base, form), name=named, seed=seed)


def _in_form(recipe: Recipe, form: str) -> Recipe:
    plain = replace(recipe.sparsify, calibration=0)
    if form == "dense":
        return replace(recipe, kind="dense", sparsify=plain, finetune=FinetuneRecipe())
    if form == "progressive":
        return replace(recipe, sparsify=replace(plain, schedule="progressive"))
    if form == "one-shot":
        return replace(recipe, sparsify=plain, finetune=replace(recipe.finetune, recalibrate_bn=True))
    return recipe


def main() -> None:
    """Run all, and write the rows beside those of other tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("runs", type=Path, help="folder for the runs")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.5])
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=["refitted"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, help="10 for imagenette, 20 for tiny-imagenet")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    os.environ["IMAGES"] = str(options.images)
    compared = {options.runs / recipe.name: (facts, recipe) for facts, recipe in recipes(TASKS[options.task], options)}
    gpu = torch.cuda.is_available() and options.device != "cpu"
    with solver_pool(default_workers(on_gpu=gpu)) as executor:
        outcomes = run_side_by_side(
            {path: recipe for path, (_, recipe) in compared.items()}, jobs=options.jobs, executor=executor
        )
    rows = []
    for path, (facts, recipe) in compared.items():
        summary = outcomes[path]
        if not isinstance(summary, RunSummary):
            print(f"{path.name}: {type(summary).__name__}: {summary}")
            continue
        rows.append(
            facts
            | {
                "task": options.task,
                "epochs": recipe.stage2.epochs,
                "batch_size": recipe.data.batch_size,
                "lr": recipe.stage2.lr,
                "removed_params": round(summary.removed_param_fraction or 0.0, 4),
                "top1": summary.finetuned.last_top1,
                "seconds": round(sum(summary.seconds.values())),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    environment = describe(("torch", "torchvision"))
    environment["command"] = str(environment["command"]).replace(str(options.images), "FOLDER")
    environment["gpu"] = torch.cuda.get_device_name() if gpu else None
    sittings = with_sitting(read_sittings(options.out), {"environment": environment, "rows": rows})
    options.out.write_text(json.dumps({"sittings": sittings}, indent=2) + "\n")


if __name__ == "__main__":
    main()
