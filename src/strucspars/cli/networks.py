"""Networks and images that the commands work on: by name, from a file, from a run folder."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from strucspars.cli.console import ImageShape
from strucspars.data.catalogue import digits
from strucspars.export.storage import PLAN_KEY, SELECTION_KEY, load
from strucspars.io.files import check_readable
from strucspars.models.catalogue import OWN_NETWORKS, build_model, names_a_function
from strucspars.models.weights import load_weights_
from strucspars.prune.slimming import load_slimmed
from strucspars.train.outcome import RunSummary, read_summary
from strucspars.train.recipe import DataRecipe, Kind, Recipe
from strucspars.train.run_folder import ONE_SHOT, RunFolder

CIFAR_SHAPE: ImageShape = (3, 32, 32)
# To build a network just for its shapes. Not two classes: many networks have a single output for those.
FEW_CLASSES = 3
READERS: dict[Kind, Callable[[Path, nn.Module], nn.Module]] = {
    "strucspars": load,
    "dense": load,
    "slimming": load_slimmed,
}


def usual_image_shape(model: str) -> ImageShape:
    """The images that a network of this name is made for.

    >>> usual_image_shape("preact-resnet20"), usual_image_shape("resnet50")
    ((3, 32, 32), (3, 224, 224))
    """
    return CIFAR_SHAPE if model.startswith(tuple(OWN_NETWORKS)) else (3, 224, 224)


def usual_classes(model: str) -> int:
    """The number of classes that a network of this name is made for."""
    return 10 if model.startswith(tuple(OWN_NETWORKS)) else 1000


def data_image_shape(data: DataRecipe) -> ImageShape:
    """The shape of the images of a recipe, without reading them."""
    if data.name == "digits":
        return digits().image_shape
    return CIFAR_SHAPE if data.name.startswith("cifar") else (3, data.image_size, data.image_size)


def saved_image_shape(folder: RunFolder, recipe: Recipe) -> ImageShape:
    """The shape of the images that the network in a run folder is made for."""
    if not folder.is_one_shot:
        return data_image_shape(recipe.data)
    channels, height, width = folder.remembered(ONE_SHOT)["image_shape"]
    return channels, height, width


def file_stem(model: str) -> str:
    """The name of a network as part of a file name."""
    return model.replace(":", "-").replace("/", "-")


def refuse_ignored(reason: str, options: Mapping[str, object]) -> None:
    """Raise a `ValueError` for options that were given and would have no effect.

    Args:
        reason: why not.
        options: their values by name; None where not given.
    """
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{' and '.join(given)}: {reason}; leave {'it' if len(given) == 1 else 'them'} out")


def checkpoint_model(target: str, model: str | None) -> str:
    """The name of the network whose weights a file holds, which the user must give."""
    if model is None:
        raise ValueError(f"{target} holds weights only; tell whose with --model, such as --model resnet50")
    return model


def check_named(folder: RunFolder, name: str, *, named: str | None, option: str) -> None:
    """Refuse to run code that a folder names, unless the user names it too.

    Args:
        folder: of the run.
        name: of its network.
        named: the name that the user gave, if any.
        option: how to give it.
    """
    if names_a_function(name) and name != named:
        raise ValueError(
            f"the run in {folder.path} takes its network from the function {name}; code that a folder names is run "
            f"only if you name it too: {option}{name}"
        )
    if named is not None and named != name:
        raise ValueError(f"{option}{named}: the run in {folder.path} has the network {name}; leave it out")


def check_is_run_folder(folder: RunFolder) -> None:
    """Raise a `FileNotFoundError` for a folder without a recipe, which says what is missing."""
    if not folder.recipe_path.is_file():
        missing = f"it has no {folder.recipe_path.name}" if folder.path.is_dir() else "there is no such folder"
        raise FileNotFoundError(
            f"{folder.path} is no run folder: {missing}; give one that strucspars run or compress --run has made"
        )


def finished_summary(folder: RunFolder) -> RunSummary:
    """The summary of a run, or a `FileNotFoundError` if it is not finished."""
    check_is_run_folder(folder)
    summary = read_summary(folder)
    if summary is None:
        raise FileNotFoundError(
            f"the run in {folder.path} is not finished; strucspars run with its recipe goes on, "
            f"strucspars summary {folder.path} tells how far it is"
        )
    return summary


def run_with_network(path: Path, *, named: str | None) -> tuple[RunFolder, Recipe]:
    """The folder of a finished run or of one-shot compression, with its recipe.

    Args:
        path: of the folder.
        named: the name of its network, as the user gives it.
    """
    folder = RunFolder(path)
    if not folder.is_one_shot:
        finished_summary(folder)
    recipe = folder.load_recipe()
    check_named(folder, recipe.model.name, named=named, option="--model ")
    return folder, recipe


def saved_network(folder: RunFolder, recipe: Recipe) -> nn.Module:
    """The network in a run folder; its number of classes is read off the file."""
    return READERS[recipe.kind](folder.model_path, dense_network(folder, recipe))


def dense_network(folder: RunFolder, recipe: Recipe) -> nn.Module:
    """The network that was made smaller, with fresh weights."""
    again = "" if folder.is_one_shot else ", or delete it and summary.json and run again: the last checkpoint has both"
    classes = _classes_of_file(folder.model_path, recipe.model.name, remedy=f"restore it from a copy{again}")
    return build_model(recipe.model.name, num_classes=classes)


def network_of_file(path: Path, name: str) -> nn.Module:
    """The network of a safetensors file: grouped, slimmed, or a plain state dict.

    Args:
        path: the file.
        name: of the network, as in `build_model`.
    """
    model = build_model(name, num_classes=_classes_of_file(path, name, remedy="restore it from a copy"))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if PLAN_KEY in metadata:
        return load(path, model)
    if SELECTION_KEY in metadata:
        return load_slimmed(path, model)
    load_weights_(model, str(path), name)
    return model


def _class_axes(name: str) -> dict[tuple[str, int], tuple[int, int]]:
    """Axes of tensors that grow with the number of classes: their length for `FEW_CLASSES`, and their growth per class.

    Empty for a network that is the same for any number of classes.
    """
    few, more = (build_model(name, num_classes=FEW_CLASSES + added).state_dict() for added in (0, 1))
    axes = {
        (key, axis): (length, longer - length)
        for key in few.keys() & more.keys()
        for axis, (length, longer) in enumerate(zip(few[key].shape, more[key].shape, strict=False))
        if length != longer
    }
    # Axis 0 where there is one: grouping shortens the input axis of a weight, never the output axis.
    return {place: lengths for place, lengths in axes.items() if place[1] == 0} or axes


def _classes_of_file(path: Path, name: str, *, remedy: str) -> int:
    if not path.is_file():
        raise FileNotFoundError(f"there is no saved network at {path}; give the path of one")
    check_readable(path)
    axes = _class_axes(name)
    try:
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            shapes = {key: file.get_slice(key).get_shape() for key, _ in axes if key in stored}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable safetensors file, or damaged: {error}; {remedy}") from error
    if not axes:
        return FEW_CLASSES
    classes = {
        FEW_CLASSES + Fraction(shapes[key][axis] - length, growth)
        for (key, axis), (length, growth) in axes.items()
        if len(shapes.get(key, ())) > axis
    }
    if len(classes) != 1 or min(classes).denominator != 1 or min(classes) < 1:
        raise ValueError(f"{path} holds no network {name!r}: its classifier is missing; give the right --model")
    return int(classes.pop())
