"""`strucspars sweep`: one network at several targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strucspars.cli import console
from strucspars.cli.bench import listed, rate

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strucspars.cli.networks import Target
    from strucspars.data.batches import Batches

EXAMPLES = console.examples(
    "strucspars sweep DEFAULT --model resnet50 --data ~/imagenet --targets 0.1,0.2,0.3",
    "strucspars sweep resnet50 --budget latency --orders one-shuffle --targets 0.3,0.5,0.7 --out sweep.png",
    "strucspars sweep runs/cifar10-resnet56-dense data.root=~/cifar10 --targets 0.3,0.5",
)
FIGURES = (".png", ".svg")


def sweep(
    network: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="A network by name, a checkpoint with --model, or the folder of a finished run.",
            autocompletion=console.complete_model,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Of a run: changes to data.* of its recipe.", show_default="none"),
    ] = None,
    targets: Annotated[
        str, typer.Option(metavar="0.3,0.5", help="Fractions to remove of all parameters, or of what --budget counts.")
    ] = "0.3,0.5,0.7",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Images to compress with, and those of val/ or test/ to score on; or package.module:function.",
            show_default="the run's",
        ),
    ] = None,
    val: Annotated[str | None, typer.Option(metavar="FOLDER", help="Labelled images to score on.")] = None,
    images: Annotated[int, typer.Option(metavar="N", min=2, help="How many images to compress with.")] = 256,
    budget: Annotated[
        str, typer.Option(help="What the targets count: params, macs, latency, or package.module:function.")
    ] = "params",
    orders: console.Orders = "free",
    levels: console.Levels = "threshold",
    min_channels_per_group: console.MinChannelsPerGroup = 1,
    model: console.Model = None,
    classes: console.Classes = None,
    image_shape: console.ImageShapeOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Also draw the table to this .png or .svg file.", callback=console.from_home),
    ] = None,
    force: console.Force = False,
    quiet: console.Quiet = False,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Compress a network without training at several targets, and compare the files: accuracy, size, milliseconds.

    With images it is refitted for every target, as by compress. Without, the table has only times and the kept norm.
    The files are timed in turn in ONNX Runtime, on one core. Run nothing else on the machine meanwhile.
    """
    from strucspars.cli.networks import find_target
    from strucspars.io.files import followed, write_bytes, write_text
    from strucspars.nn.layers import is_grouped
    from strucspars.report.sweep import sweep_figure
    from strucspars.sparsify.config import SparsifyConfig
    from strucspars.train.sweep import sweep as swept

    output = console.Output(as_json=as_json, quiet=quiet)
    options: dict[str, Any] = {"budget": budget, "orders": orders, "levels": levels}
    config = SparsifyConfig(min_channels_per_group=min_channels_per_group, **options)
    wanted = listed("--targets", targets, rate, "fractions between 0 and 1")
    if out is not None:
        if out.suffix not in FIGURES:
            raise ValueError(f"--out {out}: name a file that ends in {' or '.join(FIGURES)}")
        console.check_can_be_written(out, force=force)
    found = find_target(network, model=model, classes=classes, image_shape=console.parse_image_shape(image_shape))
    dense = found.network().eval()
    if any(is_grouped(module) for module in dense.modules()):
        raise ValueError(f"{network}: this network is compressed already; give dense weights, or a dense run")
    calibration, batches = _images(found, dense, data, val, overrides or [], count=images)
    with console.work_progress(output) as show:
        outcome = swept(
            dense,
            wanted,
            config,
            name=found.name,
            image_shape=found.image_shape,
            calibration=calibration,
            preprocessing=found.preprocessing,
            batches=() if batches is None else batches.epoch(0),
            on_progress=lambda what, done, total: show(what, done / max(total, 1)),
        )
    text = str(outcome)
    if out is not None:
        figure, path = sweep_figure(outcome), followed(out)
        if out.suffix == ".png":
            write_bytes(path, figure.png())
        else:
            write_text(path, figure.svg())
        text += f"\n\n{out}  the same as a figure"
    output.outcome(text, {"out": None if out is None else str(out), **vars(outcome)})


def _images(
    found: Target, dense: nn.Module, data: str | None, val: str | None, overrides: Sequence[str], *, count: int
) -> tuple[list[torch.Tensor] | None, Batches | None]:
    """Images to compress with and labelled ones to score on: of a folder or function, else of the run."""
    from dataclasses import replace

    from strucspars.cli.networks import refuse_ignored
    from strucspars.models.preprocessing import at_size, preprocessing_of
    from strucspars.train.deploy import (
        has_test_images,
        images_to_calibrate,
        labelled_batches,
        num_outputs,
    )
    from strucspars.train.recipe import EngineRecipe
    from strucspars.train.run import Run

    is_run = found.folder is not None and not found.folder.is_one_shot
    for change in overrides:
        if not change.startswith("data.") or not is_run or data is not None:
            raise ValueError(f"{change!r}: only data.* of a run can change, without --data; leave it out")
    if found.weights is None:
        because = f"{found.name} by name has random weights (give DEFAULT or a checkpoint with --model {found.name})"
        refuse_ignored(because, {"--data": data, "--val": val})
    if data is None:
        refuse_ignored("there are no images to refit with without --data", {"--val": val})
        if found.folder is None or not is_run:
            return None, None
        recipe = found.folder.load_recipe(overrides)
        run = Run(replace(recipe, engine=EngineRecipe(device="cpu")), found.folder)
        return run.calibration_images(count), run.test
    known = at_size(found.preprocessing or preprocessing_of(found.name), found.image_shape[-1])
    place = val or (data if has_test_images(data) else None)
    num_classes = num_outputs(dense, found.image_shape)
    labelled = None if place is None else labelled_batches(place, known, num_classes=num_classes)
    return images_to_calibrate(data, known, count=count), labelled
