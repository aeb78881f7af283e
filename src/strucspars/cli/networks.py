"""The networks that the commands work on: in a run folder, in a file, or by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from torch import nn

from strucspars.cli.console import ImageShape
from strucspars.core.plan import Preprocessing
from strucspars.data.catalogue import digits
from strucspars.export.storage import PLAN_KEY, SELECTION_KEY, load, opened, read_plan
from strucspars.models.catalogue import OWN_NETWORKS, build_model, check_takes_images, names_a_function
from strucspars.models.preprocessing import preprocessing_of
from strucspars.models.weights import CHECKPOINT_SUFFIXES, load_weights_
from strucspars.train.outcome import RunSummary, read_summary
from strucspars.train.recipe import DataRecipe, Recipe
from strucspars.train.run_folder import DATA_OF_FUNCTION, ONE_SHOT, RunFolder
from strucspars.train.slimming import load_slimmed

CIFAR_SHAPE: ImageShape = (3, 32, 32)
SAFETENSORS = ".safetensors"
# Classes of a network that is built only for its shapes. Not two: many networks then have a single output.
FEW_CLASSES = 3


@dataclass(frozen=True, kw_only=True)
class Target:
    """A network that a command works on; it is built when it is needed.

    Without `num_classes`, that is read off the file; without `weights`, they are random.
    """

    name: str
    image_shape: ImageShape
    num_classes: int | None
    weights: str | None
    folder: RunFolder | None = None
    recipe: Recipe | None = None
    preprocessing: Preprocessing | None = None

    def dense(self) -> nn.Module:
        """The network before it was made smaller, with random weights."""
        num_classes = self.num_classes
        if num_classes is None:
            num_classes = _classes_of_file(Path(self.weights or ""), self.name, self.folder)
        return build_model(self.name, num_classes=num_classes)

    def network(self) -> nn.Module:
        """The network with its weights."""
        model = self.dense()
        if self.weights is not None:
            model = read_weights(model, self.weights, self.name)
        check_takes_images(self.name, model, self.image_shape)
        return model


def find_target(
    target: str, *, model: str | None, classes: int | None = None, image_shape: ImageShape | None = None
) -> Target:
    """The network in a run folder; of a checkpoint or torchvision's weights, with `model`; or by name alone."""
    path = Path(target).expanduser()
    if path.is_dir():
        refuse_ignored(f"the run in {target} has its own", {"--classes": classes})
        folder, recipe = run_with_network(path, named=model)
        if image_shape is None and (folder.is_one_shot or names_a_function(recipe.data.name)):
            key = ONE_SHOT if folder.is_one_shot else DATA_OF_FUNCTION
            image_shape = tuple(folder.remembered(key)["image_shape"])
        return Target(
            name=recipe.model.name,
            image_shape=image_shape or data_image_shape(recipe.data),
            num_classes=None,
            weights=str(folder.model_path),
            folder=folder,
            recipe=recipe,
            preprocessing=_stored_preprocessing(folder.model_path),
        )
    # Names of timm's networks may have a slash too, as in timm:hf-hub:owner/name.
    if model is None and (path.suffix in CHECKPOINT_SUFFIXES or ("/" in target and ":" not in target)):
        if path.is_file():
            raise ValueError(
                f"{target} holds weights but no network; name the network with --model, such as --model resnet50"
            )
        raise FileNotFoundError(
            f"there is no file or folder {target}; give the folder of a run, a checkpoint with --model, or the name "
            "of a network"
        )
    has_classes = path.suffix == SAFETENSORS
    if has_classes:
        refuse_ignored(f"the number of classes is read from {target}", {"--classes": classes})
    name = model or target
    weights = None if model is None else str(path)
    stored, shape = _stored_preprocessing(path), image_shape or usual_image_shape(name)
    if stored is not None and image_shape is None:
        shape = len(stored.mean), stored.size, stored.size
    is_of_library = not names_a_function(name) and not name.startswith(tuple(OWN_NETWORKS))
    return Target(
        name=name,
        image_shape=shape,
        num_classes=None if has_classes else classes or usual_classes(name),
        weights=weights,
        preprocessing=preprocessing_of(name, weights) if weights is not None and is_of_library else stored,
    )


def run_with_network(path: Path, *, named: str | None) -> tuple[RunFolder, Recipe]:
    """The folder of a finished run or of one-shot compression, with its recipe.

    A network that is a function is used only if the user has named the function too.
    """
    folder = RunFolder(path)
    if not folder.is_one_shot:
        finished_summary(folder)
    recipe = folder.load_recipe()
    name = recipe.model.name
    if named is not None and named != name:
        raise ValueError(f"--model {named}: the run in {path} has the network {name}; leave it out")
    if named is None and names_a_function(name):
        raise ValueError(
            f"the run in {path} takes its network from the function {name}; code that a folder names is run only if "
            f"you name it too: --model {name}"
        )
    return folder, recipe


def finished_summary(folder: RunFolder) -> RunSummary:
    """The summary of a run, or a `FileNotFoundError` if it is not finished."""
    check_is_run_folder(folder)
    summary = read_summary(folder)
    if summary is None:
        raise FileNotFoundError(
            f"the run in {folder.path} is not finished; resume it by strucspars run with its recipe, or see its "
            f"progress: strucspars summary {folder.path}"
        )
    return summary


def check_is_run_folder(folder: RunFolder) -> None:
    """Raise a `FileNotFoundError` for a folder without a recipe, which says what is missing."""
    if not folder.recipe_path.is_file():
        missing = f"it has no {folder.recipe_path.name}" if folder.path.is_dir() else "there is no such folder"
        raise FileNotFoundError(
            f"{folder.path} is not a run folder: {missing}; give one that strucspars run or compress --run has made"
        )


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


def _stored_preprocessing(path: Path) -> Preprocessing | None:
    plan = read_plan(path)
    return None if plan is None else plan.preprocessing


def file_stem(model: str) -> str:
    """The name of a network as part of a file name."""
    return model.replace(":", "-").replace("/", "-")


def refuse_ignored(reason: str, options: Mapping[str, object]) -> None:
    """Raise a `ValueError` if options were given (are not None) that would have no effect for this reason."""
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{' and '.join(given)}: {reason}; leave {'it' if len(given) == 1 else 'them'} out")


def read_weights(model: nn.Module, weights: str, name: str) -> nn.Module:
    """Load weights into a dense model; it becomes grouped or slimmed if the file is."""
    path = Path(weights)
    if path.suffix == SAFETENSORS:
        with opened(path) as file:
            metadata = file.metadata() or {}
        if PLAN_KEY in metadata:
            return load(path, model)
        if SELECTION_KEY in metadata:
            return load_slimmed(path, model)
    load_weights_(model, weights, name, with_classifier=True)
    return model


def _classes_of_file(path: Path, name: str, folder: RunFolder | None) -> int:
    axes = _class_axes(name)
    remedy = "restore it from a copy"
    if folder is not None and not folder.is_one_shot:
        remedy += ", or delete it and summary.json and run again: the last checkpoint has both"
    with opened(path, remedy) as file:
        stored = set(file.keys())
        shapes = {key: file.get_slice(key).get_shape() for key, _ in axes if key in stored}
    if not axes:
        return FEW_CLASSES
    classes = {
        FEW_CLASSES + Fraction(shapes[key][axis] - length, growth)
        for (key, axis), (length, growth) in axes.items()
        if len(shapes.get(key, ())) > axis
    }
    if len(classes) != 1 or min(classes).denominator != 1 or min(classes) < 1:
        raise ValueError(f"{path} does not hold a network {name!r}: its classifier is missing; give the right --model")
    return int(classes.pop())


def _class_axes(name: str) -> dict[tuple[str, int], tuple[int, int]]:
    """Axes of tensors that grow with the number of classes: length for `FEW_CLASSES`, and growth per class."""
    few, more = (build_model(name, num_classes=FEW_CLASSES + added).state_dict() for added in (0, 1))
    axes = {
        (key, axis): (length, longer - length)
        for key in few.keys() & more.keys()
        for axis, (length, longer) in enumerate(zip(few[key].shape, more[key].shape, strict=False))
        if length != longer
    }
    # Axis 0 where there is one: grouping shortens the input axis of a weight, never the output axis.
    return {place: lengths for place, lengths in axes.items() if place[1] == 0} or axes
