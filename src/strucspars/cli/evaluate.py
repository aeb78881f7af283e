"""`strucspars eval`: the saved network of a finished run on its test images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strucspars.cli import console

if TYPE_CHECKING:
    from strucspars.train.epochs import Accuracy

CHANGEABLE = ("data.", "engine.")
EXAMPLES = console.examples(
    "strucspars eval runs/demo",
    "strucspars eval runs/cifar10-resnet56-60 data.root=/elsewhere/cifar10 engine.device=cpu",
)


def complete_changeable_key(incomplete: str) -> list[str]:
    """Keys of a recipe that eval can change."""
    return [key for key in console.complete_key(incomplete) if key.startswith(CHANGEABLE)]


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
    model: console.Model = None,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Evaluate the saved network of a finished run again. Only data.* and engine.* can be changed."""
    from dataclasses import asdict, replace

    from strucspars.cli.networks import finished_summary, read_weights, run_with_network
    from strucspars.train.engine import lost_processes_explained
    from strucspars.train.epochs import Evaluation
    from strucspars.train.run import Run

    for change in overrides or []:
        if not change.startswith(CHANGEABLE):
            raise ValueError(f"{change!r}: eval does not change the network; only data.* and engine.* can change")
    run_folder, _ = run_with_network(folder, named=model)
    recipe = run_folder.load_recipe(overrides or [])
    recorded_top1 = None if run_folder.is_one_shot else finished_summary(run_folder).converted_top1
    # For a single pass, capturing a CUDA graph costs more than it saves.
    run = Run(replace(recipe, engine=replace(recipe.engine, cuda_graph=False)), run_folder)
    run.check_classes_of(run_folder)
    network = run.engine.placed(read_weights(run.fresh_model(), str(run_folder.model_path), recipe.model.name))
    with lost_processes_explained():
        accuracy = Evaluation(run.engine, network, run.test).accuracy()
    console.Output(as_json=as_json).outcome(
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
