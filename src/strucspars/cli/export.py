"""`strucspars export`: a run or a checkpoint becomes a file for a deployment runtime."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from strucspars.cli.options import Classes, Debug, Force, ImageShape, Json, examples, from_home, parsed_image_shape
from strucspars.cli.output import Output

EXAMPLES = examples(
    "strucspars export runs/cifar10-resnet20-40 --format onnx",
    "strucspars export small.safetensors --model resnet50 --format openvino --out small.xml",
    "strucspars export resnet50.pth --model resnet50 --format torch --image-shape 3x160x160",
)


class FileFormat(StrEnum):
    """What runs the file."""

    onnx = "onnx"
    openvino = "openvino"
    torch = "torch"


def export(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="The folder of a finished run; or with --model a .safetensors, .pt or .pth file.",
        ),
    ],
    format: Annotated[FileFormat, typer.Option(help="What the file is for.")],
    model: Annotated[
        str | None, typer.Option(help="The network whose weights a checkpoint holds.", show_default=False)
    ] = None,
    classes: Classes = None,
    image_shape: ImageShape = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write.", show_default="RUN/model.onnx or MODEL.onnx, .xml, .pt2", callback=from_home
        ),
    ] = None,
    widen_groups_below: Annotated[
        int | None,
        typer.Option(
            metavar="CHANNELS",
            min=1,
            help="Run narrower groups as wider ones, with zeros between.",
            show_default="16 for onnx and openvino, else 1",
        ),
    ] = None,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the inference graph of a network to a file that is checked in its runtime.

    Batch norms and channel shuffles are folded into the weights where they can be. The file is written only if its
    runtime computes what the network does.
    """
    from strucspars.cli.exporting import document, exported_network

    report = exported_network(
        target,
        format=format.value,
        model=model,
        classes=classes,
        image_shape=None if image_shape is None else parsed_image_shape(image_shape),
        out=out,
        widen_groups_below=widen_groups_below,
        force=force,
    )
    Output(as_json=as_json).outcome(str(report), document(report))
