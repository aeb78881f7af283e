"""`strucspars export`: write a trained network to a file for a runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strucspars.cli import console

if TYPE_CHECKING:
    from strucspars.cli.networks import Target
    from strucspars.export.checked import ExportReport
    from strucspars.export.int8 import Int8

EXAMPLES = console.examples(
    "strucspars export runs/cifar10-resnet20-40",
    "strucspars export small.safetensors --model resnet50 --format openvino --out small.xml",
    "strucspars export resnet50.pth --model resnet50 --format torch --image-shape 3x160x160",
    "strucspars export small.safetensors --model resnet50 --int8 --calibrate photos --val labelled",
)
IMAGES = 300
MAX_DROP = 1.0


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
    int8: console.Int8 = False,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="With --int8: a folder of images like those to come, or package.module:function.",
            show_default="the images that a run learned from",
        ),
    ] = None,
    images: console.CalibrationImages = IMAGES,
    val: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="With --int8: labelled images to check the accuracy on.",
            show_default="val/ or test/ in --calibrate; without labels, the top classes are compared",
        ),
    ] = None,
    max_drop: console.MaxDrop = MAX_DROP,
    force: console.Force = False,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Write the inference graph of a network to a file that is checked in its runtime.

    Batch norms and channel shuffles are folded into the weights where possible. The file is written only if its
    outputs in the runtime are those of the network.

    With --int8, the file is smaller and faster. It is written only if it is nearly as accurate as in float32; layers
    that hurt most are left in float32.
    """
    from strucspars.cli.networks import find_target, refuse_ignored

    shape = console.parse_image_shape(image_shape)
    found = find_target(target, model=model, classes=classes, image_shape=shape)
    if found.weights is None:
        raise FileNotFoundError(
            f"there is no file or folder {target}; give the folder of a finished run, or with --model a checkpoint "
            "or the name of torchvision's weights"
        )
    if not int8:
        changed = {"--images": (images, IMAGES), "--max-drop": (max_drop, MAX_DROP)}
        given = {option: value if value != usual else None for option, (value, usual) in changed.items()}
        refuse_ignored("without --int8 nothing is quantised", {"--calibrate": calibrate, "--val": val, **given})
    report = export_network(
        found,
        format=format,
        out=out,
        widen_groups_below=widen_groups_below,
        quantize=lambda: int8_options(found, calibrate, val, images=images, max_drop=max_drop) if int8 else None,
        force=force,
    )
    console.Output(as_json=as_json).outcome(str(report), export_document(report))


def export_network(
    found: Target,
    *,
    format: str,
    out: Path | None = None,
    widen_groups_below: int | None = None,
    quantize: Callable[[], Int8 | None] = lambda: None,
    force: bool = False,
) -> ExportReport:
    """Export a network, by default into the folder of its run; `quantize` reads images only once all else is right."""
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
        quantize=quantize(),
    )


def int8_options(found: Target, calibrate: str | None, val: str | None, *, images: int, max_drop: float) -> Int8:
    """How to quantise a network, with images of a folder or a function; without, those of its run."""
    from strucspars.cli.networks import refuse_ignored
    from strucspars.core.plan import Preprocessing
    from strucspars.models.preprocessing import at_size
    from strucspars.train.deploy import int8_of_data, int8_of_run, num_outputs

    if calibrate is None:
        if found.folder is None or found.recipe is None or found.folder.is_one_shot:
            raise ValueError(
                "--int8 needs images to calibrate with; give a folder of some hundred that look like those to come: "
                "--calibrate FOLDER, or --calibrate package.module:function"
            )
        refuse_ignored("a run is checked on its own test images without --calibrate", {"--val": val})
        return int8_of_run(found.recipe, found.folder, images=images, max_drop=max_drop)
    known = at_size(found.preprocessing or Preprocessing(), found.image_shape[-1])
    outputs = num_outputs(found.network().eval(), found.image_shape)
    return int8_of_data(calibrate, val, known, images=images, num_classes=outputs, max_drop=max_drop)


def export_document(report: ExportReport) -> dict[str, Any]:
    """The report of an export, for `--json`."""
    from dataclasses import asdict

    return {**asdict(report), "path": str(report.path)}
