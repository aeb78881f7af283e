"""`strucspars eval`: the saved network of a finished run on its test images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strucspars.cli.console import Debug, Json, Output, complete_key, examples

if TYPE_CHECKING:
    from strucspars.train.epochs import Accuracy

CHANGEABLE = ("data.", "engine.")
NAMING = "model.name="
EXAMPLES = examples(
    "strucspars eval runs/demo",
    "strucspars eval runs/cifar10-resnet56-60 data.root=/elsewhere/cifar10 engine.device=cpu",
)


def complete_changeable_key(incomplete: str) -> list[str]:
    """Keys of a recipe that eval can change."""
    return [key for key in complete_key(incomplete) if key.startswith(CHANGEABLE)]


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a finished run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the recipe, such as engine.device=cpu.",
            autocompletion=complete_changeable_key,
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Evaluate the saved network of a finished run again. Only data.* and engine.* can be changed.

    Where the network is a function of your own, name it again: model.name=package.module:function.
    """
    from dataclasses import asdict, replace

    from strucspars.cli.networks import READERS, check_named, finished_summary
    from strucspars.train.engine import lost_processes_explained
    from strucspars.train.epochs import Evaluation
    from strucspars.train.recipe_reading import read_recipe
    from strucspars.train.run import Run
    from strucspars.train.run_folder import RunFolder

    names = [override.removeprefix(NAMING) for override in overrides or [] if override.startswith(NAMING)]
    changes = [override for override in overrides or [] if not override.startswith(NAMING)]
    for change in changes:
        if not change.startswith(CHANGEABLE):
            raise ValueError(f"{change!r}: eval takes a finished network as it is; only data.* and engine.* can change")
    run_folder = RunFolder(folder)
    recorded_top1 = None if run_folder.is_one_shot else finished_summary(run_folder).converted_top1
    recipe = read_recipe(run_folder.recipe_path, changes)
    check_named(run_folder, recipe.model.name, named=names[-1] if names else None, option=NAMING)
    # For a single pass, capturing a CUDA graph costs more than it saves.
    run = Run(replace(recipe, engine=replace(recipe.engine, cuda_graph=False)), run_folder)
    run.check_classes_of(run_folder)
    model = run.engine.placed(READERS[recipe.kind](run_folder.model_path, run.fresh_model()))
    with lost_processes_explained():
        accuracy = Evaluation(run.engine, model, run.test).accuracy()
    Output(as_json=as_json).outcome(
        accuracy_text(run_folder.model_path, recipe.data.name, accuracy, recorded_top1),
        {"folder": str(folder), "data": recipe.data.name, **asdict(accuracy), "recorded_top1": recorded_top1},
    )


def accuracy_text(model_path: Path, data: str, accuracy: Accuracy, recorded_top1: float | None) -> str:
    """The accuracy now, beside the one in the run's summary; None if it has none (one-shot compression)."""
    from strucspars.cost.text_table import percent
    from strucspars.train.run_folder import ONE_SHOT_STATE

    if recorded_top1 is None:
        recorded = ONE_SHOT_STATE
    else:
        difference = accuracy.top1 - recorded_top1
        now = "the same" if difference == 0 else f"{100 * difference:+.2f} points now"
        recorded = f"{percent(recorded_top1)} top-1: {now}"
    return (
        f"{model_path} on the test images of {data}\n"
        f"top-1     {percent(accuracy.top1)}\n"
        f"top-5     {percent(accuracy.top5)}\n"
        f"loss      {accuracy.loss:.4f}\n"
        f"recorded  {recorded}"
    )
