"""`strucspars compress`: a checkpoint becomes a smaller one, without training."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from strucspars.cli.options import Classes, Debug, Force, ImageShape, Json, examples, from_home, parsed_image_shape
from strucspars.cli.output import Output

EXAMPLES = examples(
    "strucspars compress resnet50.pth --model resnet50 --target 0.35",
    "strucspars compress DEFAULT --model resnet18 --target 0.3 --budget macs --out small.safetensors",
    "strucspars compress resnet50.pth --model resnet50 --target 0.6 --min-channels-per-group 16",
    "strucspars compress resnet50.pth --model resnet50 --target 0.6 --run runs/one-shot",
    "strucspars compress DEFAULT --model convnext_tiny --target 0.4 --layer-type Conv2d --layer-type Linear",
    "strucspars compress mine.pt --model my_package.networks:build --classes 7 --image-shape 3x160x160 --target 0.5",
)


class Budget(StrEnum):
    """What the target is a fraction of."""

    params = "params"
    macs = "macs"


Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT", help="A .pt, .pth or .safetensors file of a state dict, or torchvision weights (DEFAULT)."
    ),
]
Model = Annotated[str, typer.Option(help="The network: preact-resnet20, resnet50, timm:NAME, package.module:function.")]
MinChannelsPerGroup = Annotated[
    int, typer.Option(min=1, help="No group narrower than this; CPU runtimes are slow below 16.")
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Only layers of such names; may be repeated.", show_default="'*'"),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="No layer of such a name; may be repeated.", show_default=False),
]
LayerType = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TYPE",
        help="Group layers of this type: Conv2d, Conv1d, Conv3d or Linear; may be repeated.",
        show_default="Conv2d",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="The file to write.", show_default="MODEL-compressed.safetensors", callback=from_home),
]
Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="FOLDER",
        help="Also make a run folder, for strucspars report.",
        show_default=False,
        callback=from_home,
    ),
]


def compress(
    checkpoint: Checkpoint,
    model: Model,
    target: Annotated[float, typer.Option(help="Fraction of the whole network to remove.")],
    budget: Annotated[Budget, typer.Option(help="What the target counts.")] = Budget.params,
    min_channels_per_group: MinChannelsPerGroup = 1,
    include: Include = None,
    exclude: Exclude = None,
    layer_type: LayerType = None,
    classes: Classes = None,
    image_shape: ImageShape = None,
    out: Out = None,
    run: Run = None,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Group the convolutions of a trained network as its weights are: one-shot, without training.

    Much of the weights' norm is lost this way, and only training brings the accuracy back. `run` does both with
    `model.weights=CHECKPOINT stage1.epochs=0`, and loses less where it may train before, too.
    """
    from strucspars.cli.networks import usual_classes, usual_image_shape
    from strucspars.cli.one_shot import compressed_checkpoint, sparsify_recipe

    done = compressed_checkpoint(
        checkpoint,
        model=model,
        sparsify=sparsify_recipe(
            target=target,
            budget=budget.value,
            min_channels_per_group=min_channels_per_group,
            include=include or ["*"],
            exclude=exclude or [],
            layer_types=layer_type or ["Conv2d"],
        ),
        classes=usual_classes(model) if classes is None else classes,
        image_shape=usual_image_shape(model) if image_shape is None else parsed_image_shape(image_shape),
        force=force,
        out=out or Path(f"{model.replace(':', '-').replace('/', '-')}-compressed.safetensors"),
        run=run,
    )
    Output(as_json=as_json).outcome(done.text(), done.document())
