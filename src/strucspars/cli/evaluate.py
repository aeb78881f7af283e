"""`strucspars eval`: evaluate the network of a finished run on its test images, or that of a file on a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strucspars.cli import console

if TYPE_CHECKING:
    from strucspars.cli.networks import Target
    from strucspars.train.epochs import Accuracy

CHANGEABLE = ("data.", "engine.")
EXAMPLES = console.examples(
    "strucspars eval runs/demo",
    "strucspars eval runs/cifar10-resnet56-60 data.root=/elsewhere/cifar10 engine.device=cpu",
    "strucspars eval small.safetensors --model resnet50 --data ~/imagenet/val",
)


def complete_changeable_key(incomplete: str) -> list[str]:
    """Keys of a recipe that eval can change."""
    return [key for key in console.complete_key(incomplete) if key.startswith(CHANGEABLE)]


def evaluate(
    target: console.RunOrCheckpoint,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the recipe, such as engine.device=cpu.",
            autocompletion=complete_changeable_key,
        ),
    ] = None,
    model: console.Model = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="For a checkpoint: a folder of images per class, also in val/ or test/; or package.module:function.",
        ),
    ] = None,
    classes: console.Classes = None,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Evaluate the saved network of a finished run again, or that of a file on a folder of images.

    For a run, only data.* and engine.* can be changed. For a file, images are prepared as it says, else as the library
    of its network does; a class folder that is named by a number belongs to the output of that number.
    """
    from dataclasses import asdict

    from strucspars.cli.networks import find_target, refuse_ignored

    path, output = Path(target).expanduser(), console.Output(as_json=as_json)
    if path.is_dir() or (data is None and not path.is_file()):
        refuse_ignored(f"the run in {target} has its own", {"--data": data, "--classes": classes})
        output.outcome(*_run_again(path, overrides or [], model))
        return
    found = find_target(target, model=model, classes=classes)
    if found.weights is None or data is None:
        raise ValueError(f"{target}: to evaluate a file, name its network and some images: --model NAME --data FOLDER")
    if overrides:
        raise ValueError(f"{overrides[0]!r}: only a run has a recipe to change, and {target} is a file; leave it out")
    accuracy = accuracy_on(found, data)
    text = accuracy_text(path, data, accuracy)
    output.outcome(text, {"path": str(path), "data": data, **asdict(accuracy), "recorded_top1": None})


def _run_again(folder: Path, overrides: Sequence[str], model: str | None) -> tuple[str, dict[str, Any]]:
    """The outcome for a run, as text and for scripts."""
    from dataclasses import asdict, replace

    from strucspars.cli.networks import finished_summary, read_weights, run_with_network
    from strucspars.models.catalogue import names_a_function
    from strucspars.train.engine import lost_processes_explained
    from strucspars.train.epochs import Evaluation
    from strucspars.train.run import Run

    for change in overrides:
        if not change.startswith(CHANGEABLE):
            raise ValueError(f"{change!r}: eval does not change the network; only data.* and engine.* can change")
    run_folder, _ = run_with_network(folder, named=model)
    recipe = run_folder.load_recipe(overrides)
    if names_a_function(recipe.data.name) and not any(each.startswith("data.name=") for each in overrides):
        raise ValueError(
            f"the run in {folder} takes its data from the function {recipe.data.name}; code that a folder names is run "
            f"only if you name it too: data.name={recipe.data.name}"
        )
    recorded_top1 = None if run_folder.is_one_shot else finished_summary(run_folder).converted_top1
    # For a single pass, capturing a CUDA graph costs more than it saves.
    run = Run(replace(recipe, engine=replace(recipe.engine, cuda_graph=False)), run_folder)
    run.check_classes_of(run_folder)
    network = run.engine.placed(read_weights(run.fresh_model(), str(run_folder.model_path), recipe.model.name))
    with lost_processes_explained():
        accuracy = Evaluation(run.engine, network, run.test).accuracy()
    return (
        accuracy_text(run_folder.model_path, recipe.data.name, accuracy, recorded_top1),
        {"folder": str(folder), "data": recipe.data.name, **asdict(accuracy), "recorded_top1": recorded_top1},
    )


def accuracy_on(found: Target, data: str) -> Accuracy:
    """The accuracy of a file's network on the images of a folder, or on the test images of a function."""
    from strucspars.models.preprocessing import preprocessing_of
    from strucspars.train.deploy import labelled_batches, num_outputs
    from strucspars.train.engine import Engine, lost_processes_explained
    from strucspars.train.epochs import Evaluation
    from strucspars.train.recipe import EngineRecipe

    engine, network = Engine(EngineRecipe(cuda_graph=False)), found.network()
    batches = labelled_batches(
        data,
        found.preprocessing or preprocessing_of(found.name),
        num_classes=num_outputs(network, found.image_shape),
        device=engine.device,
    )
    with lost_processes_explained():
        return Evaluation(engine, engine.placed(network), batches).accuracy()


def accuracy_text(model_path: Path, data: str, accuracy: Accuracy, recorded_top1: float | None = None) -> str:
    """The accuracy now, beside the one in the run's summary if there is one."""
    from strucspars.cost.text_table import percent

    text = f"""{model_path} on the test images of {data}
top-1     {percent(accuracy.top1)}
top-5     {percent(accuracy.top5)}
loss      {accuracy.loss:.4f}"""
    if recorded_top1 is None:
        return text
    difference = accuracy.top1 - recorded_top1
    now = "the same" if difference == 0 else f"{100 * difference:+.2f} points now"
    return f"{text}\nrecorded  {percent(recorded_top1)} top-1: {now}"
