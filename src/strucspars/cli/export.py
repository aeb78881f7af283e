"""`strucspars export`: a run or a checkpoint becomes a file for a deployment runtime."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from torch import nn

from strucspars.cli.console import (
    Classes,
    Debug,
    Force,
    ImageShapeOption,
    Json,
    Output,
    check_can_be_written,
    examples,
    from_home,
    parsed_image_shape,
)
from strucspars.cli.evaluate import check_has_network
from strucspars.cli.networks import (
    ImageShape,
    check_named,
    network_of_file,
    refuse_ignored,
    saved_image_shape,
    saved_network,
    usual_classes,
    usual_image_shape,
)
from strucspars.export.checked import SUFFIXES, ExportReport, Format
from strucspars.export.example_batch import random_image
from strucspars.export.onnx import export_onnx
from strucspars.export.openvino import export_openvino, openvino_module, weights_path
from strucspars.export.torch_program import export_torch
from strucspars.io.files import followed
from strucspars.models.catalogue import build_model, check_takes_images
from strucspars.models.weights import load_weights_
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder

EXPORTERS: dict[Format, Callable[..., ExportReport]] = {
    "onnx": export_onnx,
    "openvino": export_openvino,
    "torch": export_torch,
}
assert set(SUFFIXES) == set(EXPORTERS) == set(get_args(Format))


@dataclass(frozen=True, kw_only=True)
class Source:
    """A network to export.

    Attributes:
        name: what it is called, as in `build_model`.
        network: builds it, once it is known that the file can be written.
        image_shape: of its inputs.
        stem: where its files go by default, without what they end in.
    """

    name: str
    network: Callable[[], nn.Module]
    image_shape: ImageShape
    stem: Path


def exported_network(
    target: str,
    *,
    format: Format,
    model: str | None = None,
    classes: int | None = None,
    image_shape: ImageShape | None = None,
    out: Path | None = None,
    widen_groups_below: int | None = None,
    force: bool = False,
) -> ExportReport:
    """Export the network of a finished run, or of a checkpoint.

    Args:
        target: path of a run folder or of a checkpoint, or the name of torchvision's weights.
        format: of the file.
        model: name of the network that a checkpoint holds; for a run whose network is a function, its name again.
        classes: its outputs, where the checkpoint does not tell.
        image_shape: of an image; None: what the network is made for.
        out: the file to write; None: `model` in the run folder, or the network's name here.
        widen_groups_below: run narrower groups as wider ones; None: where the format is faster so.
        force: replace a file that is there.

    Raises:
        ValueError: there is no such network, or it cannot be exported.
        OSError: the file is there already, or cannot be written.
    """
    source = _source(target, model=model, classes=classes, image_shape=image_shape)
    out = out or source.stem.with_name(source.stem.name + SUFFIXES[format])
    check_can_be_written(out, force=force, companions=_companions(followed(out), format))
    network, example = source.network(), random_image(source.image_shape)
    check_takes_images(source.name, network, source.image_shape)
    return EXPORTERS[format](network, out, example, widen_groups_below=widen_groups_below)


def check_runtime(format: Format) -> None:
    """Raise an `ImportError` if a format's runtime is not installed: before the training, not after it."""
    if format == "openvino":
        openvino_module()


def exported_runs(recipes: Mapping[Path, Recipe], format: Format) -> Iterator[ExportReport]:
    """Export the networks of finished runs into their folders, one after the other, anew where a file is there.

    Args:
        recipes: by run folder. Their functions may be called: the user has named them.
        format: of the files.
    """
    for path, recipe in recipes.items():
        yield exported_network(str(path), format=format, model=recipe.model.name, force=True)


def document(report: ExportReport) -> dict[str, Any]:
    """An export for scripts."""
    return {**asdict(report), "path": str(report.path)}


def _companions(out: Path, format: Format) -> tuple[Path, ...]:
    """What a format may write beside a file; ONNX does only for large networks, which shows too late."""
    if format == "openvino":
        return (weights_path(out),)
    return (Path(f"{out}.data"),) if format == "onnx" else ()


def _source(target: str, *, model: str | None, classes: int | None, image_shape: ImageShape | None) -> Source:
    path = Path(target).expanduser()
    if path.is_dir():
        refuse_ignored(f"the run in {target} has its own", {"--classes": classes})
        return _run_source(RunFolder(path), model, image_shape)
    if model is None and not path.exists():
        raise FileNotFoundError(
            f"there is no file or folder {target}; give the folder of a finished run, or with --model a checkpoint or "
            "the name of torchvision's weights"
        )
    if model is None:
        raise ValueError(f"{target} holds weights only; tell whose with --model, such as --model resnet50")
    shape = image_shape or usual_image_shape(model)
    stem = Path(model.replace(":", "-").replace("/", "-"))
    if path.suffix == ".safetensors":
        refuse_ignored(f"the classes are read off {target}", {"--classes": classes})
        return Source(name=model, network=lambda: network_of_file(path, model), image_shape=shape, stem=stem)

    def loaded() -> nn.Module:
        network = build_model(
            model, num_classes=classes or usual_classes(model), image_shape=shape, must_classify=False
        )
        load_weights_(network, target, model, with_classifier=True)
        return network

    return Source(name=model, network=loaded, image_shape=shape, stem=stem)


def _run_source(folder: RunFolder, named: str | None, image_shape: ImageShape | None) -> Source:
    check_has_network(folder)
    recipe = read_recipe(folder.recipe_path)
    check_named(folder, recipe.model.name, named=named, option="--model ")
    return Source(
        name=recipe.model.name,
        network=lambda: saved_network(folder, recipe),
        image_shape=image_shape or saved_image_shape(folder, recipe),
        stem=folder.path / "model",
    )


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
    image_shape: ImageShapeOption = None,
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
    from strucspars.cli.export import document, exported_network

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
