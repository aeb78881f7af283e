"""`strucspars export`: a trained network becomes a file that a runtime runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strucspars.cli.console import (
    Classes,
    Debug,
    Force,
    ImageShape,
    ImageShapeOption,
    Json,
    Output,
    WidenGroupsBelow,
    check_can_be_written,
    complete_model,
    examples,
    from_home,
    parse_image_shape,
)

if TYPE_CHECKING:
    from torch import nn

    from strucspars.export.checked import ExportReport

EXAMPLES = examples(
    "strucspars export runs/cifar10-resnet20-40",
    "strucspars export small.safetensors --model resnet50 --format openvino --out small.xml",
    "strucspars export resnet50.pth --model resnet50 --format torch --image-shape 3x160x160",
)


def complete_format(incomplete: str) -> list[str]:
    """The formats that are built in."""
    return [name for name in ("onnx", "openvino", "torch") if name.startswith(incomplete)]


def export(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="The folder of a finished run; or with --model a .safetensors, .pt or .pth file.",
        ),
    ],
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="onnx, openvino, torch, or package.module:exporter.", autocompletion=complete_format
        ),
    ] = "onnx",
    model: Annotated[
        str | None, typer.Option(help="The network whose weights a checkpoint holds.", autocompletion=complete_model)
    ] = None,
    classes: Classes = None,
    image_shape: ImageShapeOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write.", show_default="RUN/model.onnx or MODEL.onnx, .xml, .pt2", callback=from_home
        ),
    ] = None,
    widen_groups_below: WidenGroupsBelow = None,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the inference graph of a network to a file that is checked in its runtime.

    Batch norms and channel shuffles are folded into the weights where they can be. The file is written only if its
    runtime computes what the network does.
    """
    report = export_network(
        target,
        format=format,
        model=model,
        classes=classes,
        image_shape=parse_image_shape(image_shape),
        out=out,
        widen_groups_below=widen_groups_below,
        force=force,
    )
    Output(as_json=as_json).outcome(str(report), export_document(report))


def export_network(
    target: str,
    *,
    format: str,
    model: str | None = None,
    classes: int | None = None,
    image_shape: ImageShape | None = None,
    out: Path | None = None,
    widen_groups_below: int | None = None,
    force: bool = False,
) -> ExportReport:
    """Export the network of a finished run, or of a checkpoint; the arguments are the options of the command."""
    from functools import partial

    from strucspars.cli.networks import (
        checkpoint_model,
        file_stem,
        refuse_ignored,
        run_with_network,
        saved_image_shape,
        saved_network,
        usual_image_shape,
    )
    from strucspars.convert.comparison import random_image
    from strucspars.export.checked import export as write_export
    from strucspars.export.checked import find_exporter
    from strucspars.io.files import followed
    from strucspars.models.catalogue import check_takes_images

    path = Path(target).expanduser()
    if path.is_dir():
        refuse_ignored(f"the run in {target} has its own", {"--classes": classes})
        folder, recipe = run_with_network(path, named=model)
        name, stem = recipe.model.name, folder.path / "model"
        shape = image_shape or saved_image_shape(folder, recipe)
        network_of = partial(saved_network, folder, recipe)
    else:
        if model is None and not path.exists():
            raise FileNotFoundError(
                f"there is no file or folder {target}; give the folder of a finished run, or with --model a checkpoint "
                "or the name of torchvision's weights"
            )
        name = checkpoint_model(target, model)
        if path.suffix == ".safetensors":
            refuse_ignored(f"the classes are read off {target}", {"--classes": classes})
        stem, shape = Path(file_stem(name)), image_shape or usual_image_shape(name)
        network_of = partial(_checkpoint, target, name, classes, shape)
    exporter = find_exporter(format)
    out = out or stem.with_name(stem.name + exporter.suffix)
    companions = () if out.is_dir() else exporter.companions(followed(out))
    check_can_be_written(out, force=force, companions=companions)
    network = network_of()
    check_takes_images(name, network, shape)
    example = random_image(shape)
    return write_export(network, out, example_inputs=example, format=format, widen_groups_below=widen_groups_below)


def _checkpoint(target: str, name: str, classes: int | None, image_shape: ImageShape) -> nn.Module:
    from strucspars.cli.networks import network_of_file, usual_classes
    from strucspars.models.catalogue import build_model
    from strucspars.models.weights import load_weights_

    path = Path(target).expanduser()
    if path.suffix == ".safetensors":
        return network_of_file(path, name)
    network = build_model(
        name, num_classes=classes or usual_classes(name), image_shape=image_shape, must_classify=False
    )
    load_weights_(network, target, name, with_classifier=True)
    return network


def check_runtime(format: str) -> None:
    """Raise an `ImportError` if a format's runtime is not installed: before the training, not after it."""
    from strucspars.export.checked import find_exporter

    find_exporter(format).runtime()


def export_document(report: ExportReport) -> dict[str, Any]:
    """An export for scripts."""
    from dataclasses import asdict

    return {**asdict(report), "path": str(report.path)}
