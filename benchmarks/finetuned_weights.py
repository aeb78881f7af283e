"""Trained weights compressed while they are finetuned, against the dense network finetuned alike.

    python benchmarks/finetuned_weights.py imagenette resnet50.pt ~/imagenette RUNS --epochs 10 --removed 0 0.5 0.65
    python benchmarks/finetuned_weights.py tiny-imagenet resnet18.pt ~/tiny-imagenet RUNS --epochs 20 --removed 0 0.5

The weights are state dicts in a `.pt` file, of ImageNet (Keras' ResNet-50) or of Tiny-ImageNet; the images a folder
with `train` and `val`, of Imagenette in folders named by their ImageNet outputs. Every run is the recipe of
`strucspars compress --epochs`, in one of these forms: `dense` keeps all weights, for the comparison; `cut` removes and
refits before the first epoch; `progressive` decides before the first epoch and anneals over half of the training. All
have the dense network as teacher, unless `--untaught`. The images lie in memory, cut to their centre and shifted by a
few pixels in training. Runs in RUNS that are finished are not repeated.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchvision
from environment import ROOT, describe
from over_runs import read_sittings, with_sitting
from torch import nn
from torchvision.transforms import functional

from strucspars.core.plan import Preprocessing
from strucspars.cost.text_table import Column, markdown_table
from strucspars.data.folder import read_image, resized
from strucspars.data.image_set import Augmentation, ImageSet, ResidentData
from strucspars.train.deploy import TrainedNetwork, finetuning_recipe
from strucspars.train.outcome import read_metrics
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import EngineRecipe, Recipe, SparsifyRecipe
from strucspars.train.run_folder import RunFolder

OUT = ROOT / "results" / "finetuned_weights.json"
IMAGENET = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), size=224, resize=256)
TINY = Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), size=64, resize=None)


def msra_resnet50(num_classes: int) -> nn.Module:
    """The network of Keras' weights: stride in the 1x1 convolutions, another epsilon in the batch norms."""
    model: nn.Module = torchvision.models.resnet50(weights=None, num_classes=num_classes)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and name in {f"layer{stage}.0.conv1" for stage in (2, 3, 4)}:
            module.stride = (2, 2)
        elif isinstance(module, nn.Conv2d) and name in {f"layer{stage}.0.conv2" for stage in (2, 3, 4)}:
            module.stride = (1, 1)
        elif isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    return model


def resnet18_of_64_pixels(num_classes: int) -> nn.Module:
    """ResNet-18 whose first convolution keeps the size of the image."""
    model: nn.Module = torchvision.models.resnet18(weights=None, num_classes=num_classes)
    first = model.get_submodule("conv1")
    assert isinstance(first, nn.Conv2d)
    first.stride = (1, 1)
    return model


@cache
def imagenette(root: str | None) -> ResidentData:
    """Imagenette in memory, as `resident` reads it; its folders are the numbers of ImageNet's outputs."""
    return resident("imagenette", root, IMAGENET, padding=16, labels_by_number=True)


@cache
def tiny_imagenet(root: str | None) -> ResidentData:
    """Tiny-ImageNet in memory, as `resident` reads it."""
    return resident("tiny_imagenet", root, TINY, padding=4, labels_by_number=False)


def resident(
    name: str, root: str | None, preprocessing: Preprocessing, *, padding: int, labels_by_number: bool
) -> ResidentData:
    """A folder of images, resized and cut to their centre; without a root the one that the variable IMAGES names."""
    folder = Path(root or os.environ["IMAGES"])
    names = sorted(place.name for place in (folder / "train").iterdir())
    labels = {each: int(each) if labels_by_number else place for place, each in enumerate(names)}
    train, test = (image_set(folder / split, labels, preprocessing) for split in ("train", "val"))
    return ResidentData(
        name=f"finetuned_weights:{name}",
        train=train,
        test=test,
        num_classes=1000 if labels_by_number else len(names),
        mean=preprocessing.mean,
        std=preprocessing.std,
        augmentation=Augmentation(padding=padding, flip=True),
    )


def image_set(folder: Path, labels: Mapping[str, int], preprocessing: Preprocessing) -> ImageSet:
    """All images of a folder of classes."""
    files = [(label, path) for name, label in labels.items() for path in sorted((folder / name).iterdir())]

    def pixels(file: tuple[int, Path]) -> torch.Tensor:
        image = functional.center_crop(resized(read_image(str(file[1])), preprocessing), preprocessing.size)
        found: torch.Tensor = functional.pil_to_tensor(image)
        return found

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        images = torch.stack(list(threads.map(pixels, files)))
    return ImageSet(images=images, labels=torch.tensor([label for label, _ in files]))


def recipe_of(options: argparse.Namespace, removed: float, form: str, seed: int) -> Recipe:
    """The recipe of `strucspars compress --epochs` in one of the forms."""
    if options.data == "imagenette":
        name, num_classes, preprocessing = "msra_resnet50", 1000, IMAGENET
    else:
        name, num_classes, preprocessing = "resnet18_of_64_pixels", 200, TINY
    network = TrainedNetwork(
        name=f"finetuned_weights:{name}",
        weights=str(options.weights),
        num_classes=num_classes,
        preprocessing=preprocessing,
        image_shape=(3, preprocessing.size, preprocessing.size),
    )
    sparsify = SparsifyRecipe(target=removed or 0.5)
    run = run_name(options, removed, form, seed)
    data = f"finetuned_weights:{options.data.replace('-', '_')}"
    recipe = finetuning_recipe(run, network, data, None, epochs=options.epochs, sparsify=sparsify)
    recipe = replace(recipe, seed=seed, engine=EngineRecipe(precision=options.precision, channels_last=True))
    if options.rate is not None:
        recipe = replace(recipe, stage2=replace(recipe.stage2, lr=options.rate))
    if options.untaught:
        recipe = replace(recipe, finetune=replace(recipe.finetune, teacher=None))
    if form == "dense":
        return replace(recipe, kind="dense", sparsify=SparsifyRecipe())
    if form == "progressive":
        return replace(recipe, sparsify=replace(recipe.sparsify, schedule="progressive", decide_by=0.0, anneal=0.5))
    return replace(recipe, sparsify=replace(recipe.sparsify, schedule="two-stage"))


def run_name(options: argparse.Namespace, removed: float, form: str, seed: int) -> str:
    """What a run is called, in its folder and in the results."""
    what = form if form == "dense" else f"{form}-{removed:g}"
    rate = "" if options.rate is None else f"-rate{options.rate:g}"
    return f"{options.data}-{what}-{options.epochs}{rate}{'-untaught' if options.untaught else ''}-seed{seed}"


def measured(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """What one run came to."""
    summary = run_pipeline(recipe, folder)
    last = read_metrics(RunFolder(folder))[-1]
    return {
        "run": recipe.name,
        "seed": recipe.seed,
        "epochs": recipe.stage2.epochs,
        "removed_params": round(summary.removed_param_fraction, 4),
        "removed_macs": round(summary.removed_mac_fraction, 4),
        "rate": recipe.stage2.lr,
        "batch_size": recipe.data.batch_size,
        "top1": summary.finetuned.last_top1,
        "test_loss": round(last["test_loss"], 4),
        "seconds": round(sum(summary.seconds.values())),
    }


def table(sittings: Sequence[dict[str, Any]]) -> str:
    """The rows of all sittings as a table of the documentation, each beside the dense network finetuned alike."""
    rows = sorted((row for each in sittings for row in each["rows"]), key=lambda row: str(row["run"]))

    def kind(row: dict[str, Any]) -> tuple[str, str]:
        data, form = (
            str(row["run"]).split(f"-{row['epochs']}")[0].rsplit("-", 1 if not row["removed_params"] else 2)[:2]
        )
        return data, form

    dense = {(kind(row)[0], row["epochs"], row["seed"]): row["top1"] for row in rows if not row["removed_params"]}
    cells = []
    for row in rows:
        data, form = kind(row)
        lost = 100 * (row["top1"] - dense[data, row["epochs"], row["seed"]])
        cells.append(
            (
                data,
                form,
                f"{row['removed_params']:.0%}, {row['removed_macs']:.0%}",
                str(row["epochs"]),
                f"{row['rate']:g}",
                f"{row['top1']:.2%}",
                "" if not row["removed_params"] else f"{lost:+.2f}",
            )
        )
    titles = ("images", "form", "removed: params, MACs", "epochs", "rate", "top-1", "against dense")
    columns = zip(titles, zip(*cells, strict=True), strict=True)
    return markdown_table([Column(title, each, is_text=place < 2) for place, (title, each) in enumerate(columns)])


def main() -> None:
    """Measure, and write every run as soon as it is finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=["imagenette", "tiny-imagenet"])
    parser.add_argument("weights", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("runs", type=Path, help="folder for the runs, which resume there")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--removed", type=float, nargs="+", required=True, help="fractions of parameters; 0 for dense")
    parser.add_argument("--forms", nargs="+", choices=["cut", "progressive"], default=["cut", "progressive"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--untaught", action="store_true", help="without the dense network as teacher")
    parser.add_argument("--rate", type=float, help="another learning rate than the recipe's")
    parser.add_argument("--precision", choices=["32", "bf16"], default="32")
    parser.add_argument("--out", type=Path, default=OUT, help="rows of other runs that are in it stay")
    options = parser.parse_args()
    os.environ["IMAGES"] = str(options.images)
    environment = describe(("torch", "torchvision"))
    # Recorded commands name no folder of this machine.
    for place in ("weights", "images", "runs"):
        environment["command"] = str(environment["command"]).replace(str(getattr(options, place)), place.upper())
    if torch.cuda.is_available():
        environment["hardware"] = {"gpu": torch.cuda.get_device_name()}
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        for removed in options.removed:
            for form in options.forms if removed else ["dense"]:
                recipe = recipe_of(options, removed, form, seed)
                rows.append(measured(recipe, options.runs / recipe.name))
                print(json.dumps(rows[-1]), flush=True)
                sittings = with_sitting(read_sittings(options.out), {"environment": environment, "rows": rows})
                options.out.write_text(json.dumps({"sittings": sittings}, indent=2) + "\n")


if __name__ == "__main__":
    main()
