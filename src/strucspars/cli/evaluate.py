"""`strucspars eval`: the saved network of a finished run on its test images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from strucspars.cli.console import Debug, Json, Output, examples
from strucspars.cli.networks import READERS, check_named
from strucspars.report.one_shot import ONE_SHOT_STATE
from strucspars.train.engine import Engine
from strucspars.train.evaluation import Accuracy, Evaluation
from strucspars.train.outcome import RunSummary, read_summary
from strucspars.train.outcome_text import percent
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder
from strucspars.train.setting import Setting

CHANGEABLE = ("data.", "engine.")
NAMING = "model.name="


@dataclass(frozen=True)
class EvaluatedRun:
    """What the saved network of a run does on the test images.

    Attributes:
        path: the run folder.
        data: name of the data set.
        accuracy: now.
        recorded_top1: when the run was finished; None for a network of one-shot compression.
    """

    path: Path
    data: str
    accuracy: Accuracy
    recorded_top1: float | None

    def text(self) -> str:
        """For people."""
        return (
            f"{self.path / 'model.safetensors'} on the test images of {self.data}\n"
            f"top-1     {percent(self.accuracy.top1)}\n"
            f"top-5     {percent(self.accuracy.top5)}\n"
            f"loss      {self.accuracy.loss:.4f}\n"
            f"recorded  {self._comparison()}"
        )

    def _comparison(self) -> str:
        if self.recorded_top1 is None:
            return ONE_SHOT_STATE
        difference = self.accuracy.top1 - self.recorded_top1
        now = "the same" if difference == 0 else f"{100 * difference:+.2f} points now"
        return f"{percent(self.recorded_top1)} top-1: {now}"

    def document(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "folder": str(self.path),
            "data": self.data,
            **asdict(self.accuracy),
            "recorded_top1": self.recorded_top1,
        }


def check_is_run_folder(folder: RunFolder) -> None:
    """Refuse a folder without a recipe.

    Raises:
        FileNotFoundError: says whether the folder is missing, or something in it.
    """
    if not folder.recipe_path.is_file():
        missing = f"it has no {folder.recipe_path.name}" if folder.path.is_dir() else "there is no such folder"
        raise FileNotFoundError(
            f"{folder.path} is no run folder: {missing}; give one that strucspars run or compress --run has made"
        )


def finished_summary(folder: RunFolder) -> RunSummary:
    """The summary of a finished run.

    Raises:
        FileNotFoundError: there is no run, or it is not finished.
        ValueError: the file is damaged.
    """
    check_is_run_folder(folder)
    summary = read_summary(folder)
    if summary is None:
        raise FileNotFoundError(
            f"the run in {folder.path} is not finished; strucspars run with its recipe goes on, "
            f"strucspars summary {folder.path} tells how far it is"
        )
    return summary


def check_has_network(folder: RunFolder) -> None:
    """Refuse a folder without a network to use: that of a finished run, or of one-shot compression.

    Raises:
        FileNotFoundError: there is no run, or it is not finished.
        ValueError: its summary is damaged.
    """
    if not folder.is_one_shot:
        finished_summary(folder)


def evaluated_run(path: Path, overrides: Sequence[str]) -> EvaluatedRun:
    """Evaluate the saved network of a finished run, or of one-shot compression.

    Args:
        path: the run folder; one-shot compression knows no data, so `data.root` must tell.
        overrides: `key=value`, of the data and the engine only: anything else would be another network. Where that is
            a function of the user's own, `model.name=...` must name it again.

    Raises:
        ValueError: an override of something else, or the data are not there or have other classes.
        FileNotFoundError: the run is not finished.
    """
    named = [override.removeprefix(NAMING) for override in overrides if override.startswith(NAMING)]
    for override in overrides:
        if not override.startswith((*CHANGEABLE, NAMING)):
            raise ValueError(
                f"{override!r}: eval takes a finished network as it is; only data.* and engine.* can change"
            )
    folder = RunFolder(path)
    recorded_top1 = None if folder.is_one_shot else finished_summary(folder).converted_top1
    recipe = read_recipe(folder.recipe_path, [override for override in overrides if not override.startswith(NAMING)])
    check_named(folder, recipe.model.name, named=named[-1] if named else None, option=NAMING)
    # One pass only: capturing it in a graph would cost more than it saves.
    engine = Engine(replace(recipe.engine, cuda_graph=False))
    setting = Setting(recipe, engine)
    setting.check_classes_of(folder)
    model = engine.placed(READERS[recipe.kind](folder.model_path, setting.fresh_model()))
    accuracy = Evaluation(engine, model, setting.test).accuracy()
    return EvaluatedRun(path, recipe.data.name, accuracy, recorded_top1)


EXAMPLES = examples(
    "strucspars eval runs/demo",
    "strucspars eval runs/cifar10-resnet56-60 data.root=/elsewhere/cifar10 engine.device=cpu",
)


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a finished run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Changes to the recipe, such as engine.device=cpu.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Evaluate the saved network of a finished run again. Only data.* and engine.* can be changed.

    Where the network is a function of your own, name it again: model.name=package.module:function.
    """
    from strucspars.cli.evaluate import evaluated_run

    done = evaluated_run(folder, overrides or [])
    Output(as_json=as_json).outcome(done.text(), done.document())
