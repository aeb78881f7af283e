"""Whether two recipes describe the same run, or two runs of the same row, wherever these runs take place."""

import re
from pathlib import Path
from typing import Any

from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import SHORT, flat_options
from strucspars.train.run_folder import RunFolder

# Where the data are and what computes: on another machine it is still the same run.
PLACE = (
    *("data.root", "data.val", "data.download", "data.workers"),
    *("engine.device", "engine.cuda_graph", "engine.solver_workers"),
)
# Files and folders may have moved: only the last part of their path counts.
PATHS = ("sparsify.from_run", "finetune.teacher", "model.weights")
# Sections that runs of one kind read.
READERS = {"sparsify": "strucspars", "slimming": "slimming"}
# What runs of one row need not share.
FREE = ("seed", "sparsify.from_run", "finetune.form", "engine.channels_last", "engine.compile")

# Of the options that differ, in an error. By repr: a folder from anywhere may hold characters that move the cursor.
SHOWN_KEYS = 8


def identity(recipe: Recipe) -> dict[str, Any]:
    """The options that make a run this one, by dotted key; those that it does not read have their defaults."""
    options, defaults = flat_options(recipe), flat_options(Recipe(name="any"))
    for key, value in options.items():
        section = key.partition(".")[0]
        is_unread = READERS.get(section, recipe.kind) != recipe.kind or (recipe.is_progressive and section == "stage1")
        if key in PLACE or is_unread:
            options[key] = defaults[key]
        elif key in PATHS and value is not None:
            options[key] = Path(value).name
    return options


def protocol(recipe: Recipe) -> tuple[str, ...]:
    """What runs of one row have in common, as overrides: all but seed, place and form, and the seed of the teacher."""
    options = {key: value for key, value in identity(recipe).items() if key not in (*PLACE, *FREE)}
    teacher = options["finetune.teacher"]
    options["finetune.teacher"] = teacher and without_seed(teacher)
    return tuple(f"{key}={value}" for key, value in options.items())


def changes(recipe: Recipe, other: Recipe) -> tuple[str, ...]:
    """The options in which the protocol of a recipe differs from that of another, without those of a section that the
    other kind of run does not read; names do not count.

    >>> from strucspars.train.recipe import EngineRecipe
    >>> changes(Recipe(name="mine", engine=EngineRecipe(precision="bf16")), Recipe(name="other", seed=2))
    ('engine.precision=bf16',)
    """
    others = protocol(other)
    unread = [f"{section}." for section, kind in READERS.items() if kind != other.kind]
    return tuple(
        option for option in protocol(recipe) if option not in others and not option.startswith(("name=", *unread))
    )


def first_stage_changes(recipe: Recipe, other: Recipe) -> tuple[str, ...]:
    """The options of a recipe, different from another's, that decide the network after the first stage."""
    parts = ("seed", "data", "model", "sparsify", "stage1")
    mine, others = identity(recipe), identity(other)
    return tuple(
        f"{key}={value}"
        for key, value in mine.items()
        if key.partition(".")[0] in parts and key != "sparsify.from_run" and value != others[key]
    )


def without_seed(folder: str) -> str:
    """The row that a run folder of this name belongs to.

    >>> without_seed("demo-seed2"), without_seed("demo")
    ('demo', 'demo')
    """
    return re.sub(r"-seed[0-9]+$", "", folder)


def check_same_run(folder: RunFolder, recipe: Recipe) -> None:
    """Refuse a recipe for a folder that holds a run with another one; the message shows where they differ."""
    if not folder.recipe_path.is_file() or not folder.is_begun:
        return
    before, now = identity(folder.load_recipe()), identity(recipe)
    differing = [key for key, value in now.items() if value != before[key]]
    if differing:
        shown = [
            f"  {key}: {SHORT.repr(before[key])} there, {SHORT.repr(now[key])} now" for key in differing[:SHOWN_KEYS]
        ]
        if len(differing) > SHOWN_KEYS:
            shown.append(f"  and {len(differing) - SHOWN_KEYS} more")
        raise ValueError(
            f"{folder.path} holds a run with another recipe:\n" + "\n".join(shown) + "\n"
            "give the recipe of that run, use another folder, or delete this one"
        )
