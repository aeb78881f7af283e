"""`strucspars summary`: a run, a saved network, or a network by name, layer by layer."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from strucspars.cli.console import Classes, Debug, ImageShapeOption, Json, Output, examples, parsed_image_shape
from strucspars.cli.evaluate import check_is_run_folder, finished_summary
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
from strucspars.cli.running import run_state
from strucspars.convert.fold import fold
from strucspars.cost.gathers import FoldReport, fold_report
from strucspars.cost.summary import summary as network_summary
from strucspars.cost.text_table import Column, text_table
from strucspars.export.example_batch import random_image
from strucspars.models.catalogue import build_model, check_takes_images
from strucspars.models.weights import PICKLED_SUFFIXES
from strucspars.nn.groupable import LayerRules
from strucspars.report.one_shot import read_one_shot
from strucspars.train.outcome import read_metrics
from strucspars.train.outcome_text import duration, outcome_text, percent
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder


@dataclass(frozen=True)
class Description:
    """The same for people and for scripts."""

    text: str
    document: Mapping[str, Any]


def described(
    target: str, *, model: str | None = None, classes: int | None = None, image_shape: ImageShape | None = None
) -> Description:
    """Describe a run folder, a saved network or a network by name.

    Args:
        target: path of a folder or file, or a name as in `build_model`.
        model: name of the network that a file holds; for a run whose network is a function, its name again.
        classes: number of classes of a network by name.
        image_shape: to count MACs with, but for a run; None: what the network is made for.

    Raises:
        ValueError: there is no such thing, something is missing, or an option does not apply.
        FileNotFoundError: the target is meant as a path, but nothing is there.
    """
    path = Path(target).expanduser()
    if path.is_dir():
        refuse_ignored(f"the run in {target} has its own", {"--classes": classes, "--image-shape": image_shape})
        return _described_run(RunFolder(path), named=model)
    if path.suffix == ".safetensors":
        if model is None:
            raise ValueError(f"{target} holds weights only; tell whose with --model, such as --model resnet50")
        refuse_ignored(f"the classes are read off {target}", {"--classes": classes})
        network, shape = network_of_file(path, model), image_shape or usual_image_shape(model)
        check_takes_images(model, network, shape)
        return _described_network(network, shape)
    _refuse_other_path(target, model)
    refuse_ignored(
        f"it is for files and runs, and there is no file or folder {target!r}",
        {"--model": model},
    )
    shape = image_shape or usual_image_shape(target)
    try:
        network = build_model(target, num_classes=classes or usual_classes(target))
    except ValueError as error:
        raise ValueError(
            f"{target!r} is neither a folder nor a .safetensors file, and as a network: {error}"
        ) from error
    check_takes_images(target, network, shape)
    return _described_network(network, shape)


def _refuse_other_path(target: str, model: str | None) -> None:
    """Refuse paths that are neither a folder nor a .safetensors file: as names of networks they would be a riddle."""
    path = Path(target).expanduser()
    # Networks of timm's may come from a hub, hf-hub:owner/name.
    looks_like_path = path.suffix in PICKLED_SUFFIXES or ("/" in target and ":" not in target)
    if looks_like_path and not path.exists():
        raise FileNotFoundError(
            f"there is no file or folder {target}; give the folder of a run, a .safetensors file with --model, or the "
            "name of a network"
        )
    if path.is_file() and (looks_like_path or model is not None):
        name = model or "NAME"
        raise ValueError(
            f"{target} is no .safetensors file, and summary reads no other. Files of {' and '.join(PICKLED_SUFFIXES)} "
            f"have the layers of their network: strucspars summary {name}; export and compress read them, with "
            f"--model {name}"
        )


def _described_network(network: nn.Module, shape: ImageShape, *, rules: LayerRules | None = None) -> Description:
    image = random_image(shape)
    layers = network_summary(network, image, rules=rules)
    document = {"image_shape": list(shape), **asdict(layers)}
    if not layers.gathers:
        return Description(str(layers), document)
    report = fold_report(fold(network, image))
    folded = {
        "gathers": len(report.gathers),
        "gathered_bytes": report.gathered_bytes,
        "untraced_reason": report.untraced_reason,
    }
    return Description(f"{layers}\n{_after_fold(report)}", {**document, "after_fold": folded})


def _after_fold(report: FoldReport) -> str:
    noun = "gather" if len(report.gathers) == 1 else "gathers"
    line = f"after fold: {len(report.gathers):,} {noun}, {report.gathered_bytes:,} bytes"
    if not report.untraced_reason:
        return line
    return f"{line}; the network could not be traced: {report.untraced_reason.splitlines()[0].strip()}"


def _described_run(folder: RunFolder, *, named: str | None) -> Description:
    state = run_state(folder.path)
    if not state.is_finished and not state.is_one_shot:
        return _described_unfinished(folder, state.words)
    recipe = read_recipe(folder.recipe_path)
    outcome = _one_shot_outcome(folder, state.words) if state.is_one_shot else _run_outcome(folder, recipe)
    check_named(folder, recipe.model.name, named=named, option="--model ")
    # Other kinds do not read the rules, which may then name layers that are not there.
    rules = recipe.sparsify.rules() if recipe.kind == "strucspars" else None
    network = _described_network(saved_network(folder, recipe), saved_image_shape(folder, recipe), rules=rules)
    document = {"folder": str(folder.path), "state": state.words, **outcome.document, "network": network.document}
    return Description(f"{network.text}\n\n{outcome.text}", document)


def _run_outcome(folder: RunFolder, recipe: Recipe) -> Description:
    outcome = finished_summary(folder)
    return Description(outcome_text(outcome, recipe, folder), {"summary": outcome.to_json()})


def _one_shot_outcome(folder: RunFolder, state: str) -> Description:
    one_shot = read_one_shot(folder)
    assert one_shot is not None, "its state says so"
    text = (
        f"{folder.path}: {state}; strucspars eval with data.root=FOLDER measures it\n"
        f"{one_shot.lost_norm:.1%} of the norm of the layers that can be grouped is lost"
    )
    return Description(text, {"summary": None, "one_shot": one_shot.to_json()})


def _described_unfinished(folder: RunFolder, state: str) -> Description:
    check_is_run_folder(folder)
    rows = read_metrics(folder)
    lines = [f"{folder.path}: {state}; strucspars run with its recipe goes on"]
    if rows:
        lines += ["", _progress_table(rows)]
    return Description("\n".join(lines), {"folder": str(folder.path), "state": state, "summary": None, "metrics": rows})


def _progress_table(rows: list[dict[str, Any]]) -> str:
    """The last epoch of every stage so far."""
    last = {row["stage"]: row for row in rows}
    seconds = {stage: sum(row["seconds"] for row in rows if row["stage"] == stage) for stage in last}
    return text_table(
        [
            Column("stage", list(last), is_text=True),
            Column("epoch", [str(row["epoch"]) if row["epoch"] else "" for row in last.values()]),
            Column("accuracy", [percent(row["test_top1"]) for row in last.values()]),
            Column("removed", [percent(row.get("removed_fraction")) for row in last.values()]),
            Column("time", [duration(seconds[stage]) for stage in last]),
        ]
    )


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
    image_shape: ImageShapeOption = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a network consists of, or how far a run has come."""
    from strucspars.cli.summary import described

    shape = None if image_shape is None else parsed_image_shape(image_shape)
    found = described(target, model=model, classes=classes, image_shape=shape)
    Output(as_json=as_json).outcome(found.text, found.document)
