"""`strucspars compress`: a checkpoint becomes a smaller one, without training."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strucspars.cli import console

if TYPE_CHECKING:
    from torch import nn

    from strucspars.core.checks import FloatArray
    from strucspars.core.plan import GroupingPlan
    from strucspars.train.recipe import Recipe

SUFFIX = ".safetensors"
HEADING = "# One-shot: the weights were grouped as they are. None of the stages below has run.\n"
SMALLEST_IMAGE = 8
EXAMPLES = console.examples(
    "strucspars compress resnet50.pth --model resnet50 --target 0.35",
    "strucspars compress DEFAULT --model resnet18 --target 0.3 --budget macs --out small.safetensors",
    "strucspars compress resnet50.pth --model resnet50 --target 0.6 --min-channels-per-group 16",
    "strucspars compress resnet50.pth --model resnet50 --target 0.6 --run runs/one-shot",
    "strucspars compress DEFAULT --model convnext_tiny --target 0.4 --layer-type Conv2d --layer-type Linear",
    "strucspars compress mine.pt --model my_package.networks:build --classes 7 --image-shape 3x160x160 --target 0.5",
)


def compress(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A .pt, .pth or .safetensors file of a state dict, or torchvision weights (DEFAULT).",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="The network: preact-resnet20, resnet50, timm:NAME, package.module:function.",
            autocompletion=console.complete_model,
        ),
    ],
    target: Annotated[
        float, typer.Option(help="Fraction of the whole network to remove: of all parameters, or of all MACs.")
    ],
    budget: Annotated[
        str, typer.Option(help="What the target counts: params, macs, or package.module:function.")
    ] = "params",
    importance: Annotated[
        str, typer.Option(help="How much a connection matters: l1, l2, or package.module:function.")
    ] = "l1",
    orders: Annotated[
        str, typer.Option(help="Which channel orders are learned: free, or package.module:function.")
    ] = "free",
    min_channels_per_group: console.MinChannelsPerGroup = 1,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only layers of such names; may be repeated.", show_default="'*'"),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="No layer of such a name; may be repeated.")
    ] = None,
    layer_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE",
            help="Group layers of this type: Conv2d, Conv1d, Conv3d or Linear; may be repeated.",
            show_default="Conv2d",
        ),
    ] = None,
    classes: console.Classes = None,
    image_shape: console.ImageShapeOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write.", show_default="MODEL-compressed.safetensors", callback=console.from_home
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Also make a run folder, for strucspars report.", callback=console.from_home
        ),
    ] = None,
    force: console.Force = False,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Group the convolutions of a trained network by its current weights: one-shot, without training.

    This loses much of the weights' norm, and only finetuning restores the accuracy. `run` with
    `model.weights=CHECKPOINT stage1.epochs=0` does both; with a first stage it loses less.
    """
    from dataclasses import asdict

    import torch

    from strucspars.cli.networks import file_stem, usual_classes, usual_image_shape
    from strucspars.convert.conversion import convert_
    from strucspars.cost.summary import summary
    from strucspars.export.storage import save
    from strucspars.models.catalogue import build_model
    from strucspars.models.weights import load_weights_
    from strucspars.nn.groupable import select_layers
    from strucspars.nn.importance import importance_matrix
    from strucspars.sparsify.planning import kept_fraction, one_shot_plan
    from strucspars.train.recipe import DataRecipe, ModelRecipe, Recipe, SparsifyRecipe
    from strucspars.train.run_folder import RunFolder

    asked: dict[str, Any] = {
        "target": target,
        "budget": budget,
        "importance": importance,
        "orders": orders,
        "min_channels_per_group": min_channels_per_group,
        "include": tuple(include or ["*"]),
        "exclude": tuple(exclude or []),
        "layer_types": tuple(layer_type or ["Conv2d"]),
    }
    sparsify = SparsifyRecipe(**asked)
    num_classes = usual_classes(model) if classes is None else classes
    shape = console.parse_image_shape(image_shape) or usual_image_shape(model)
    out = out or Path(f"{file_stem(model)}-compressed{SUFFIX}")
    console.check_can_be_written(out, force=force)
    if out.suffix != SUFFIX:
        raise ValueError(f"--out {out}: the network is written as a {SUFFIX} file; call it {out.with_suffix(SUFFIX)}")
    if run is not None:
        if os.path.lexists(run) or run.name == "..":
            raise FileExistsError(f"{run} exists already; name a new folder with --run, such as runs/one-shot")
        RunFolder(run).check_usable()
    network = build_model(model, num_classes=num_classes, image_shape=shape, must_classify=False)
    load_weights_(network, checkpoint, model, with_classifier=True)
    example = torch.zeros(1, *shape)
    plan = one_shot_plan(network, sparsify.config(), example_inputs=example)
    layers = select_layers(network, sparsify).layers
    lost_norm = 1 - kept_fraction(layers, plan)
    # Before the conversion: the summary shows the kept norm of each layer, the folder its whole importance.
    sizes = summary(network, example, plan=plan, rules=sparsify)
    matrices = {layer.name: importance_matrix(layer.weight) for layer in layers} if run is not None else {}
    save(convert_(network, plan), out, plan=plan)
    recipe = Recipe(
        name=out.stem if run is None else run.absolute().name,
        # The data stand for the images that MACs are counted with.
        data=DataRecipe(name="folder", image_size=max(*shape[1:], SMALLEST_IMAGE)),
        model=ModelRecipe(name=model, weights=checkpoint),
        sparsify=sparsify,
    )
    written = f"{out}  the compressed network; strucspars.load({str(out)!r}, model) reads it"
    if run is not None:
        one_shot = {"classes": num_classes, "image_shape": list(shape), "lost_norm": lost_norm}
        _write_run_folder(run, recipe, plan, network, matrices, one_shot)
        written += f"\n{run}  the run folder; strucspars report {run} shows it"
    text = (
        f"{sizes}\n\n{written}\n\n"
        "Group the dense weights again and finetune, with your own data.root; some epochs of stage1 lose less:\n"
        f"  {_next_command(recipe)}"
    )
    places = {"path": str(out), "run": None if run is None else str(run)}
    console.Output(as_json=as_json).outcome(text, {**places, **asked, "lost_norm": lost_norm, **asdict(sizes)})


def _next_command(recipe: Recipe) -> str:
    """The command that groups and finetunes the network, by the recipe of the package that its images suggest."""
    from dataclasses import asdict

    from strucspars.cli.networks import CIFAR_SHAPE, usual_image_shape
    from strucspars.train.recipe import SparsifyRecipe
    from strucspars.train.recipe_reading import as_override

    name = "cifar10-resnet20-40" if usual_image_shape(recipe.model.name) == CIFAR_SHAPE else "imagenet-resnet50-35"
    words = [f"name={recipe.name}", f"model.name={recipe.model.name}", f"model.weights={recipe.model.weights}"]
    # The recipe has a target of its own.
    usual = asdict(SparsifyRecipe()) | {"target": None}
    wanted = asdict(recipe.sparsify)
    words += [as_override(f"sparsify.{key}", value) for key, value in wanted.items() if value != usual[key]]
    return shlex.join(["strucspars", "run", name, *words, "stage1.epochs=0"]) + " data.root=~/data"


def _write_run_folder(
    path: Path,
    recipe: Recipe,
    plan: GroupingPlan,
    network: nn.Module,
    matrices: Mapping[str, FloatArray],
    one_shot: Mapping[str, Any],
) -> None:
    """Make the run folder, whole or not at all: an `OSError` leaves nothing of it."""
    import numpy as np

    from strucspars.bench.machine import environment
    from strucspars.export.storage import save
    from strucspars.io.arrays import save_arrays
    from strucspars.io.files import disk_error, unfinished_folder
    from strucspars.train.recipe_reading import recipe_yaml
    from strucspars.train.run_folder import ONE_SHOT, RunFolder

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished_folder(path.parent) as place:
            folder = RunFolder(place / path.name)
            folder.importance.mkdir(parents=True)
            folder.write_recipe(HEADING + recipe_yaml(recipe))
            folder.write_json(folder.environment_path, environment())
            folder.save_plan(plan)
            save_arrays(folder.importance / "end.npz", {name: S.astype(np.float16) for name, S in matrices.items()})
            save(network, folder.model_path, plan=plan)
            folder.remember(ONE_SHOT, dict(one_shot))
            os.rename(folder.path, path)
    except OSError as error:
        raise disk_error("make the run folder", path, error) from error
