"""How far the run in a folder has come."""

from dataclasses import dataclass
from pathlib import Path

from strucspars.report.one_shot import ONE_SHOT_STATE
from strucspars.runs.folder import RunFolder
from strucspars.training.outcome import read_metrics
from strucspars.training.recipe_reading import read_recipe
from strucspars.training.stage_names import stage_epochs


@dataclass(frozen=True)
class RunState:
    """How far a run has come.

    Attributes:
        is_begun: there is something to go on from, or to keep.
        is_finished: there is nothing left to do.
        words: the same for people.
        is_one_shot: there is a network of one-shot compression instead of a run.
    """

    is_begun: bool
    is_finished: bool
    words: str
    is_one_shot: bool = False


def run_state(path: Path) -> RunState:
    """How far the run in a folder has come; a folder that is not there has not begun."""
    folder = RunFolder(path)
    if not folder.recipe_path.is_file():
        return RunState(False, False, "not begun")
    if folder.summary_json_path.is_file():
        return RunState(True, True, "finished")
    if folder.is_one_shot:
        return RunState(True, False, ONE_SHOT_STATE, is_one_shot=True)
    rows = read_metrics(folder)
    if not rows:
        return RunState(folder.is_begun, False, "in its first epoch" if folder.is_begun else "not begun")
    stage, epoch = rows[-1]["stage"], rows[-1]["epoch"]
    if stage == "compress":
        return RunState(True, False, "compressed, not finetuned yet")
    epochs = stage_epochs(read_recipe(folder.recipe_path), stage)
    return RunState(True, False, f"{stage}, epoch {epoch} of {epochs} done")
