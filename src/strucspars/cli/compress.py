"""`strucspars compress`: trained weights become a smaller network, with images in minutes or by finetuning."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from strucspars.cli import console
from strucspars.cli.run import finished_runs, raise_failures, run_all

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strucspars.bench.deployed import DeployedPair
    from strucspars.core.plan import GroupingPlan, PlannedLatency
    from strucspars.data.batches import Batches
    from strucspars.train.deploy import OneShot, TrainedNetwork
    from strucspars.train.recipe import Recipe, SparsifyRecipe


class Device(StrEnum):
    """Where to compute."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


SUFFIX = ".safetensors"
HEADING = "# One-shot: the weights were grouped without training. None of the stages below has run.\n"
SMALLEST_IMAGE = 8
FINETUNING_EPOCHS = 10
PREDICTION = (
    "predicted: without training, the predictions move by {:.3f} nats per image; an ImageNet ResNet-50 lost one point "
    "of accuracy at 0.04, three to four around 0.1, and ten at 0.2"
)
# docs/how-to/compress.md has the measurement.
SOME_CLASSES = (
    "the images to score on show {} of the {} classes; if those of --data show these alone, the compressed network "
    "guesses them more often, and its top-1 is too high: compress with images of all classes to compare"
)
ONNX_FILE = "{}  the same for ONNX Runtime, checked; strucspars export has other formats"
NOT_USABLE = "The network needs training before it is usable: give labelled images with --data, and --epochs"
FINETUNE = "Finetuning on labelled images (--epochs) wins accuracy back, and allows higher targets"
EXAMPLES = console.examples(
    "strucspars compress DEFAULT --model resnet50 --data ~/imagenet --target 0.2",
    "strucspars compress DEFAULT --model resnet50 --data ~/imagenet --target 0.5 --epochs 10",
    "strucspars compress mine.pt --model timm:efficientnet_lite0 --data photos --val labelled --target 0.2",
    "strucspars compress mine.pt --model resnet50 --data photos --target-ms 20 --orders one-shuffle",
    "strucspars compress resnet50.pth --model resnet50 --data photos --target 0.2 --run runs/one-shot",
    "strucspars compress mine.pt --model my_package:build --classes 7 --data my_package:images --target 0.5",
)


def compress(
    context: typer.Context,
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
        float | None, typer.Option(help="Fraction to remove: of all parameters, or of what --budget counts.")
    ] = None,
    target_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Milliseconds that an image may take, in place of --target.", min=0.0),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Images to compress with: train/ and val/, classes, or images alone; or package.module:function.",
        ),
    ] = None,
    val: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Labelled images to score on.", show_default="val/ or test/ of --data, if it has one"
        ),
    ] = None,
    epochs: Annotated[
        int, typer.Option(metavar="N", min=0, help="Finetune for so long; the images must be labelled.")
    ] = 0,
    images: Annotated[int, typer.Option(metavar="N", min=2, help="How many images to use without --epochs.")] = 256,
    budget: Annotated[
        str,
        typer.Option(
            help="What the target counts: params, macs, latency (milliseconds here), or package.module:function.",
            show_default="params; latency with --target-ms",
        ),
    ] = "",
    runtime: Annotated[
        str, typer.Option(help="Where milliseconds count, on one core: onnxruntime or openvino.")
    ] = "onnxruntime",
    levels: console.Levels = "threshold",
    importance: Annotated[
        str, typer.Option(help="How much a connection matters: l1, l2, or package.module:function.")
    ] = "l1",
    orders: console.Orders = "free",
    pieces: Annotated[
        int, typer.Option(metavar="N", min=1, help="Shuffles that remain move whole pieces of so many channels.")
    ] = 1,
    narrow: Annotated[
        str,
        typer.Option(help="Which channels may go beside groups: none, inside (not of residual streams) or all."),
    ] = "none",
    width_multiple: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --narrow, keep multiples of so many channels.")
    ] = 8,
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
    device: Annotated[
        Device, typer.Option(help="Where to compress: auto is the GPU where there is one.")
    ] = Device.AUTO,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; with --data an .onnx file comes beside it.",
            show_default="MODEL-compressed.safetensors; with --epochs in the run folder",
            callback=console.from_home,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Make a run folder, for strucspars report.",
            show_default="none; with --epochs runs/MODEL-TARGET",
            callback=console.from_home,
        ),
    ] = None,
    force: console.Force = False,
    quiet: console.Quiet = False,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Make a trained network smaller with some images, and compare both networks as files.

    Without --epochs, some hundred images, which need no labels, decide what is removed and refit the rest, in minutes.
    With --epochs the network is finetuned, taught by the dense one; the same command resumes. At the end, a table
    compares accuracy, size, and time in ONNX Runtime. Without --data the result is not usable before it is finetuned.
    """
    from strucspars.cli.networks import file_stem, refuse_ignored, usual_classes, usual_image_shape
    from strucspars.models.catalogue import names_a_function
    from strucspars.train.deploy import trained_network
    from strucspars.train.recipe import SparsifyRecipe

    if (target is None) == (target_ms is None):
        raise ValueError("give one of --target, the fraction to remove, and --target-ms, the milliseconds to reach")
    asked: dict[str, Any] = {
        **({} if target is None else {"target": target}),
        "target_ms": target_ms,
        "budget": budget or ("params" if target_ms is None else "latency"),
        "runtime": runtime,
        "levels": levels,
        "importance": importance,
        "orders": orders,
        "pieces": pieces,
        "narrow": narrow,
        "width_multiple": width_multiple,
        "min_channels_per_group": min_channels_per_group,
        "include": tuple(include or ["*"]),
        "exclude": tuple(exclude or []),
        "layer_types": tuple(layer_type or ["Conv2d"]),
    }
    shape = console.parse_image_shape(image_shape)
    if data is None:
        shape = shape or usual_image_shape(model)
        refuse_ignored("there are no images without --data", {"--val": val, "--epochs": epochs or None})
    elif shape is not None and not names_a_function(data) and (shape[0] != 3 or shape[1] != shape[2]):
        raise ValueError(f"--image-shape {image_shape}: images of a folder are cropped to squares in RGB; give 3xNxN")
    job = _Job(
        network=trained_network(
            model, checkpoint, num_classes=usual_classes(model) if classes is None else classes, image_shape=shape
        ),
        sparsify=SparsifyRecipe(**asked),
        data=data,
        val=val,
        device=device.value,
        output=console.Output(as_json=as_json, quiet=quiet),
    )
    if epochs:
        refuse_ignored("the network is written to the run folder", {"--out": out})
        name = f"{target:g}" if target_ms is None else f"{target_ms:g}ms"
        job.finetune(epochs, run or Path("runs") / f"{file_stem(model)}-{name}", asked)
        return
    out = out or Path(f"{file_stem(model)}-compressed{SUFFIX}")
    if out.suffix != SUFFIX:
        raise ValueError(f"--out {out}: the network is written as a {SUFFIX} file; call it {out.with_suffix(SUFFIX)}")
    console.check_can_be_written(out, force=force)
    if data is not None:
        console.check_can_be_written(out.with_suffix(".onnx"), force=force)
    if run is not None:
        _check_new(run)
    job.one_shot(images, out, run, asked, again=_command(context, epochs=FINETUNING_EPOCHS))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a call of the command works with."""

    network: TrainedNetwork
    sparsify: SparsifyRecipe
    data: str | None
    val: str | None
    device: Literal["auto", "cpu", "cuda"]
    output: console.Output

    def one_shot(self, images: int, out: Path, run: Path | None, asked: Mapping[str, Any], *, again: str) -> None:
        """Compress without training, save and compare; `again` is the command that finetunes instead."""
        from dataclasses import asdict

        from strucspars.export.storage import save
        from strucspars.train.deploy import images_to_calibrate

        scored = self._labelled()
        known = self.network.preprocessing
        batches = None if self.data is None else images_to_calibrate(self.data, known, count=images)
        made = self._compressed_once(batches)
        save(made.small, out, plan=made.plan)
        written = [f"{out}  the compressed network; strucspars.load({str(out)!r}, model) reads it"]
        pair = None
        if self.data is not None:
            expected = made.plan.latency
            pair = self._compared(made.dense, made.small, out.with_suffix(".onnx"), scored, expected=expected)
        if pair is not None:
            written.append(ONNX_FILE.format(pair.path))
        if run is not None:
            facts: dict[str, Any] = {} if self.data is None else {"data": self.data, "val": self.val, "images": images}
            if pair is not None:
                facts["top1"] = pair.compressed.top1
            _write_run_folder(run, self._recipe(run.absolute().name), self.network, made, facts)
            written.append(f"{run}  the run folder; strucspars report {run} shows it")
        advice = FINETUNE if self.data is not None else NOT_USABLE
        if scored is not None:
            advice += f":\n  {again}"
        texts = [str(made.sizes), *([] if pair is None else [str(pair)]), "\n".join(written), advice]
        places = {"path": str(out), "run": None if run is None else str(run)}
        document = {**places, **asked, "lost_norm": made.lost_norm, **asdict(made.sizes), **_comparison(pair)}
        self.output.outcome("\n\n".join(texts), document)

    def _compressed_once(self, batches: list[torch.Tensor] | None) -> OneShot:
        """With a bar, and what to expect before anything is converted."""
        from strucspars.train.deploy import compressed_once, device_for

        def predict(plan: GroupingPlan) -> None:
            if plan.predicted_divergence is not None:
                self.output.remark(PREDICTION.format(plan.predicted_divergence))
            if plan.latency is not None:
                self.output.remark(f"the plan {plan.latency}")

        with console.work_progress(self.output) as show:
            return compressed_once(
                self.network,
                self.sparsify,
                batches,
                device=device_for(self.device),
                on_plan=predict,
                on_progress=lambda what, done, total: show(what, done / max(total, 1)),
            )

    def finetune(self, epochs: int, path: Path, asked: Mapping[str, Any]) -> None:
        """Compress while finetuning, in a run folder, and compare the outcome with the dense network."""
        from strucspars.cli.networks import find_target
        from strucspars.train.deploy import finetuning_recipe, labelled_batches, num_outputs
        from strucspars.train.run_folder import RunFolder

        assert self.data is not None, "asked for above"
        source, name = self.network, path.absolute().name
        source.model()  # weights that cannot be used are refused here
        recipe = finetuning_recipe(
            name, source, self.data, self.val, epochs=epochs, sparsify=self.sparsify, device=self.device
        )
        is_taught = recipe.finetune.teacher is not None
        if is_taught:
            self._warn_of_some_classes(self.val or self.data)
        else:
            self.output.remark(
                f"the images have other classes than the {source.num_classes} outputs of {source.weights}: the "
                "classifier is trained anew, and the dense network does not teach"
            )
        outcomes = run_all({path: recipe}, jobs=1, output=self.output)
        raise_failures(outcomes)
        summary, folder = finished_runs(outcomes)[path], RunFolder(path)
        small = find_target(str(path), model=source.name).network().eval()
        num_classes = num_outputs(small, source.image_shape)
        batches = labelled_batches(self.val or self.data, source.preprocessing, num_classes=num_classes)
        dense = source.model(num_classes)
        plan = folder.load_plan()
        pair = self._compared(
            dense,
            small,
            folder.path / "model.onnx",
            batches,
            is_dense_trained=is_taught,
            expected=None if plan is None else plan.latency,
        )
        written = [f"{folder.model_path}  the compressed network"]
        if pair is not None:
            written.append(ONNX_FILE.format(pair.path))
        written.append(f"{path}  the run folder; strucspars report {path} shows it")
        texts = [*([] if pair is None else [str(pair)]), "\n".join(written)]
        document = {"path": str(folder.model_path), "run": str(path), **asked, "summary": summary.to_json()}
        self.output.outcome("\n\n".join(texts), {**document, **_comparison(pair)})

    def _labelled(self) -> Batches | None:
        """Images to score on, if there are some; those that were not asked for may be of other classes."""
        from strucspars.train.deploy import has_test_images, labelled_batches

        source = self.network
        place = self.val or (self.data if self.data is not None and has_test_images(self.data) else None)
        if place is None:
            return None
        try:
            batches = labelled_batches(place, source.preprocessing, num_classes=source.num_classes)
        except (FileNotFoundError, ValueError) as error:
            if self.val is not None:
                raise
            self.output.remark(f"the accuracy is not measured: {error}")
            return None
        self._warn_of_some_classes(place)
        return batches

    def _warn_of_some_classes(self, place: str) -> None:
        from strucspars.train.deploy import scored_classes

        num_classes = self.network.num_classes
        if (shown := scored_classes(place, num_classes=num_classes)) < num_classes:
            logging.getLogger("strucspars").warning(SOME_CLASSES.format(shown, num_classes))

    def _compared(
        self,
        dense: nn.Module,
        small: nn.Module,
        path: Path,
        batches: Batches | None,
        *,
        is_dense_trained: bool = True,
        expected: PlannedLatency | None = None,
    ) -> DeployedPair | None:
        """The table; None, with a warning, where the networks cannot be exported. What was saved before is kept."""
        from strucspars.bench.deployed import deployed_pair

        source = self.network
        with console.work_progress(self.output) as on_progress:
            try:
                return deployed_pair(
                    dense,
                    small,
                    path,
                    image_shape=source.image_shape,
                    preprocessing=source.preprocessing,
                    batches=() if batches is None else batches.epoch(0),
                    is_dense_trained=is_dense_trained,
                    expected=expected,
                    on_progress=on_progress,
                )
            except (ImportError, ValueError) as error:
                logging.getLogger("strucspars").warning("the networks are not compared as files: %s", error)
                return None

    def _recipe(self, name: str) -> Recipe:
        """What the run folder of one-shot compression records."""
        from strucspars.train.recipe import DataRecipe, ModelRecipe, Recipe

        # The data stand for the images that MACs are counted with.
        size = max(*self.network.image_shape[1:], SMALLEST_IMAGE)
        return Recipe(
            name=name,
            data=DataRecipe(name="folder", image_size=size),
            model=ModelRecipe(name=self.network.name, weights=self.network.weights),
            sparsify=self.sparsify,
        )


def _comparison(pair: DeployedPair | None) -> dict[str, Any]:
    """The table for scripts."""
    from dataclasses import asdict

    return {"comparison": None if pair is None else {**asdict(pair), "path": str(pair.path)}}


def _check_new(run: Path) -> None:
    from strucspars.train.run_folder import RunFolder

    if os.path.lexists(run) or run.name == "..":
        raise FileExistsError(f"{run} exists already; name a new folder with --run, such as runs/one-shot")
    RunFolder(run).check_usable()


def _command(context: typer.Context, *, epochs: int) -> str:
    """The same command with epochs to finetune."""
    words = ["strucspars", "compress", context.params["checkpoint"]]
    unwanted = ("checkpoint", "epochs", "images", "out", "run", "force", "quiet", "as_json", "debug")
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.name not in unwanted and value not in (None, [], (), option.default):
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0], f"{each:g}" if isinstance(each, float) else str(each)]
    return shlex.join([*words, "--epochs", str(epochs)])


def _write_run_folder(
    path: Path, recipe: Recipe, network: TrainedNetwork, made: OneShot, facts: Mapping[str, Any]
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
            folder.save_plan(made.plan)
            save_arrays(
                folder.importance / "end.npz", {name: S.astype(np.float16) for name, S in made.importance.items()}
            )
            save(made.small, folder.model_path, plan=made.plan)
            shape = list(network.image_shape)
            folder.remember(
                ONE_SHOT, {"classes": network.num_classes, "image_shape": shape, "lost_norm": made.lost_norm, **facts}
            )
            os.rename(folder.path, path)
    except OSError as error:
        raise disk_error("make the run folder", path, error) from error
