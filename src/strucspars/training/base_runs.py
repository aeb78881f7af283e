"""What a run builds on: the first stage of another one, or another one as its teacher."""

from dataclasses import dataclass
from pathlib import Path

from strucspars.runs.checkpoint import has_named
from strucspars.runs.folder import RunFolder
from strucspars.training.preparation import SPARSIFIED
from strucspars.training.recipe import Recipe


class BaseRunFailed(RuntimeError):
    """A run was not begun, because one that it builds on has failed; its error is the cause of this one."""


@dataclass(frozen=True, kw_only=True)
class BaseRun:
    """A run that another one builds on.

    Attributes:
        path: its folder.
        is_teacher: it must be finished; else its first stage is enough.
    """

    path: Path
    is_teacher: bool

    def __str__(self) -> str:
        return f"{self.path} as a finished teacher" if self.is_teacher else f"the first stage of {self.path}"

    @property
    def is_there(self) -> bool:
        """Whether its folder holds what is needed of it; not to be asked while it is being written."""
        folder = RunFolder(self.path)
        if self.is_teacher:
            return folder.is_finished
        return has_named(folder.checkpoints, SPARSIFIED) and folder.plan_path.is_file()

    def failed(self, error: Exception) -> BaseRunFailed:
        """What to raise for a run that cannot begin because this one ended in an error."""
        reason = " ".join(str(error).split()) or type(error).__name__
        return BaseRunFailed(f"not begun: it needs {self}, but that run failed: {reason}")


def base_runs(recipe: Recipe, path: Path) -> list[BaseRun]:
    """The runs without which a recipe cannot begin in a folder, or go on there."""
    folder, source, teacher = RunFolder(path), recipe.sparsify.from_run, recipe.finetune.teacher
    bases = []
    # From its first checkpoint on, a run has weights and a plan of its own.
    if source is not None and not folder.is_begun:
        bases.append(BaseRun(path=Path(source).expanduser(), is_teacher=False))
    if teacher is not None and not folder.is_finished:
        bases.append(BaseRun(path=Path(teacher).expanduser(), is_teacher=True))
    return bases
