"""`strucspars export`: write a trained network to a file for a runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strucspars.cli import console

if TYPE_CHECKING:
    from strucspars.cli.networks import Target
    from strucspars.export.checked import ExportReport

EXAMPLES = console.examples(
    "strucspars export runs/cifar10-resnet20-40",
    "strucspars export small.safetensors --model resnet50 --format openvino --out small.xml",
    "strucspars export resnet50.pth --model resnet50 --format torch --image-shape 3x160x160",
)


def complete_format(incomplete: str) -> list[str]:
    """The built-in formats."""
    return [name for name in ("onnx", "openvino", "torch") if name.startswith(incomplete)]


def export(
    target: console.RunOrCheckpoint,
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="onnx, openvino, torch, or package.module:exporter.", autocompletion=complete_format
        ),
    ] = "onnx",
    model: console.Model = None,
    classes: console.Classes = None,
    image_shape: console.ImageShapeOption = None,
    out: Annotated[
        Path | None, console.path_option("The file to write.", "RUN/model.onnx or MODEL.onnx, .xml, .pt2")
    ] = None,
    widen_groups_below: console.WidenGroupsBelow = None,
    force: console.Force = False,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Write the inference graph of a network to a file that is checked in its runtime.

    Batch norms and channel shuffles are folded into the weights where possible. The file is written only if its
    outputs in the runtime are those of the network.
    """
    from strucspars.cli.networks import find_target

    shape = console.parse_image_shape(image_shape)
    found = find_target(target, model=model, classes=classes, image_shape=shape)
    if found.weights is None:
        raise FileNotFoundError(
            f"there is no file or folder {target}; give the folder of a finished run, or with --model a checkpoint "
            "or the name of torchvision's weights"
        )
    report = export_network(found, format=format, out=out, widen_groups_below=widen_groups_below, force=force)
    console.Output(as_json=as_json).outcome(str(report), export_document(report))


def export_network(
    found: Target, *, format: str, out: Path | None = None, widen_groups_below: int | None = None, force: bool = False
) -> ExportReport:
    """Export a network, by default into the folder of its run; the arguments are the options of the command."""
    from strucspars.cli.networks import file_stem
    from strucspars.convert.comparison import random_image
    from strucspars.export.checked import export as write_export
    from strucspars.export.checked import find_exporter

    exporter = find_exporter(format)
    stem = Path(file_stem(found.name)) if found.folder is None else found.folder.path / "model"
    out = out or stem.with_name(stem.name + exporter.suffix)
    console.check_can_be_written(out, force=force)
    return write_export(
        found.network(),
        out,
        example_inputs=random_image(found.image_shape),
        format=format,
        widen_groups_below=widen_groups_below,
        preprocessing=found.preprocessing,
    )


def export_document(report: ExportReport) -> dict[str, Any]:
    """The report of an export, for `--json`."""
    from dataclasses import asdict

    return {**asdict(report), "path": str(report.path)}
