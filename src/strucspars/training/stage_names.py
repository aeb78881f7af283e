"""What the stages of a run are called in its metrics and checkpoints, and how long they are."""

from strucspars.training.recipe import Kind, Recipe

SPARSIFY = "sparsify"
SLIM = "slim"
COMPRESS = "compress"
FINETUNE = "finetune"
TRAIN = "train"
STAGES = (SPARSIFY, SLIM, COMPRESS, FINETUNE, TRAIN)

# By kind of run; a dense network has the second stage alone.
FIRST_STAGES: dict[Kind, str] = {"strucspars": SPARSIFY, "slimming": SLIM}


def stage_epochs(recipe: Recipe, stage: str) -> int:
    """Epochs of a stage in which something is trained.

    >>> stage_epochs(Recipe(name="mine"), FINETUNE)
    160
    """
    return recipe.stage2.epochs if stage in (FINETUNE, TRAIN) else recipe.stage1.epochs
