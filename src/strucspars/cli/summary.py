"""`strucspars summary`: a run, a saved network, or a network by name, layer by layer."""

from typing import Annotated

import typer

from strucspars.cli.options import Classes, Debug, ImageShape, Json, examples, parsed_image_shape
from strucspars.cli.output import Output

EXAMPLES = examples(
    "strucspars summary runs/demo",
    "strucspars summary resnet50",
    "strucspars summary timm:mobilenetv3_small_100 --image-shape 3x160x160",
    "strucspars summary small.safetensors --model resnet18",
)


def summary(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="A run folder, the name of a network, or a .safetensors file with --model."
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="The network whose weights a .safetensors file holds.", show_default=False)
    ] = None,
    classes: Classes = None,
    image_shape: ImageShape = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a network consists of, or how far a run has come."""
    from strucspars.cli.description import described

    shape = None if image_shape is None else parsed_image_shape(image_shape)
    found = described(target, model=model, classes=classes, image_shape=shape)
    Output(as_json=as_json).outcome(found.text, found.document)
