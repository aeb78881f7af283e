"""What `strucspars compress` works with: trained weights, images to compress with, labelled ones to score on."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from strucspars.convert.compress import compress
from strucspars.core.checks import FloatArray
from strucspars.core.plan import GroupingPlan, Preprocessing
from strucspars.cost.counting import undisturbed
from strucspars.cost.summary import Summary, summary
from strucspars.data.batches import Batches, EpochOrder, FolderBatches
from strucspars.data.catalogue import batches_of, load_data
from strucspars.data.folder import FolderSplit, calibration_images, evaluation_split, fits_outputs, test_folder
from strucspars.export.int8 import Int8
from strucspars.export.storage import read_plan
from strucspars.models.catalogue import build_model, names_a_function
from strucspars.models.preprocessing import preprocessing_of
from strucspars.models.weights import load_weights_
from strucspars.nn.groupable import select_layers
from strucspars.nn.importance import importance_matrix
from strucspars.nn.names import copied
from strucspars.sparsify.calibration import OnProgress
from strucspars.sparsify.narrowing import pruned_layers
from strucspars.sparsify.one_shot import one_shot_plan
from strucspars.sparsify.planning import kept_fraction
from strucspars.train.recipe import (
    WEIGHTS,
    DataRecipe,
    Device,
    EngineRecipe,
    FinetuneRecipe,
    ModelRecipe,
    Recipe,
    SparsifyRecipe,
    StageRecipe,
)
from strucspars.train.run import Run, default_readers
from strucspars.train.run_folder import RunFolder

BATCH_SIZE = 32
# Of finetuning: for batches of 32 and at least so many steps.
RATE = 0.005
FULL_RATE_STEPS = 500
FEWEST_BATCHES = 16
# Many images go in larger batches, as long as an epoch keeps so many.
LARGEST_BATCH = 128
MANY_BATCHES = 500
CALIBRATION_IMAGES = 256

CPU = torch.device("cpu")


def device_for(asked: Device) -> torch.device:
    """Where to compute; `auto` is the GPU where there is one."""
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise ValueError("--device cuda: PyTorch sees no GPU here; use auto or cpu")
    return torch.device("cuda") if has_gpu and asked != "cpu" else CPU


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """Weights to compress.

    Attributes:
        name: of the network, as in `build_model`.
        weights: as in `load_weights_`; they must be dense.
        num_classes: outputs of the weights.
        preprocessing: of its images.
        image_shape: channels, height and width.
    """

    name: str
    weights: str
    num_classes: int
    preprocessing: Preprocessing
    image_shape: tuple[int, int, int]

    def model(self, num_classes: int | None = None) -> nn.Module:
        """The dense network; for another number of classes with a fresh classifier."""
        classes = num_classes or self.num_classes
        model = build_model(self.name, num_classes=classes, image_shape=self.image_shape, must_classify=False)
        load_weights_(model, self.weights, self.name, with_classifier=classes == self.num_classes)
        check_finite(model, self.weights)
        return model.eval()


def trained_network(
    name: str, weights: str, *, num_classes: int, image_shape: tuple[int, int, int] | None
) -> TrainedNetwork:
    """The weights with the preprocessing of their own metadata, scaled where images have another shape.

    Raises:
        ValueError: the weights are those of a compressed network.
    """
    plan = read_plan(Path(weights).expanduser())
    if plan is not None and any(layer.group_level > 1 for layer in plan.layers.values()):
        raise ValueError(
            f"weights {weights!r}: this network is compressed already; give dense weights, or finetune it with "
            f"strucspars run and model.weights={weights}"
        )
    known = preprocessing_of(name, weights)
    if image_shape is not None and image_shape[-1] != known.size:
        resize = None if known.resize is None else round(known.resize * image_shape[-1] / known.size)
        known = replace(known, size=image_shape[-1], resize=resize)
    shape = image_shape or (len(known.mean), known.size, known.size)
    return TrainedNetwork(name=name, weights=weights, num_classes=num_classes, preprocessing=known, image_shape=shape)


def num_outputs(model: nn.Module, image_shape: tuple[int, int, int]) -> int:
    """How many scores a network gives for an image."""
    with undisturbed(model):
        scores: torch.Tensor = model(torch.zeros(1, *image_shape))
    return scores.shape[-1]


def check_finite(model: nn.Module, weights: str) -> None:
    """Refuse weights and statistics that are not finite, before any work is done with them."""
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and not value.isfinite().all():
            raise ValueError(
                f"weights {weights!r}: {name} holds NaN or infinity, so the training has diverged; give an earlier "
                "checkpoint"
            )


def images_to_calibrate(data: str, preprocessing: Preprocessing, *, count: int) -> list[torch.Tensor]:
    """Batches of some images, from a folder or from those to learn from of `package.module:function`."""
    if not names_a_function(data):
        images = calibration_images(Path(data).expanduser(), preprocessing, count=count)
        return list(torch.split(images, BATCH_SIZE))
    batches = batches_of(load_data(data, None), training=True, batch_size=BATCH_SIZE, device=CPU)
    return [batch.images.clone() for batch in itertools.islice(batches.epoch(0), math.ceil(count / BATCH_SIZE))]


def labelled_batches(
    data: str, preprocessing: Preprocessing, *, num_classes: int, device: torch.device = CPU
) -> Batches:
    """Images to score a network of so many outputs on, from a folder or those to test on of a function."""
    workers = default_readers()
    if names_a_function(data):
        made = load_data(data, None)
        if made.num_classes != num_classes:
            raise ValueError(
                f"data {data!r} have {made.num_classes} classes, but the network has {num_classes} outputs"
            )
        return batches_of(made, training=False, batch_size=BATCH_SIZE, device=device, workers=workers)
    split = evaluation_split(Path(data).expanduser(), preprocessing, num_classes=num_classes)
    order = EpochOrder(count=len(split), batch_size=BATCH_SIZE, shuffled=False, seed=0)
    return FolderBatches(split, order, device=device, workers=workers)


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """The images of batches with their labels, each once, as often as they are asked for."""

    batches: Batches

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of images and labels."""
        for batch in self.batches.epoch(0):
            yield batch.images[batch.valid].contiguous(), batch.labels[batch.valid]


def int8_of_run(recipe: Recipe, folder: RunFolder, *, images: int, max_drop: float) -> Int8:
    """How to quantise the network of a run: calibrated on images to learn from, checked on those to test on."""
    run = Run(replace(recipe, engine=EngineRecipe(device="cpu")), folder)
    return Int8(run.calibration_images(images), labelled=LabelledImages(run.test), max_drop=max_drop)


def int8_of_data(
    data: str,
    val: str | None,
    preprocessing: Preprocessing,
    *,
    images: int,
    num_classes: int,
    max_drop: float,
) -> Int8:
    """How to quantise a network with images of a folder or a function; labelled ones check it if there are some."""
    place = val or (data if has_test_images(data) else None)
    labelled = None
    if place is not None:
        labelled = LabelledImages(labelled_batches(place, preprocessing, num_classes=num_classes))
    return Int8(images_to_calibrate(data, preprocessing, count=images), labelled=labelled, max_drop=max_drop)


@dataclass(frozen=True, eq=False, kw_only=True)
class OneShot:
    """A network that was compressed without training.

    Attributes:
        dense, small: before and after.
        plan: what was removed.
        lost_norm: fraction of the norm of all layers that can be grouped.
        sizes: its layers, parameters and MACs, before and after.
        importance: of the layers of the dense network, by name.
    """

    dense: nn.Module
    small: nn.Module
    plan: GroupingPlan
    lost_norm: float
    sizes: Summary
    importance: Mapping[str, FloatArray]


def compressed_once(
    network: TrainedNetwork,
    sparsify: SparsifyRecipe,
    batches: Sequence[torch.Tensor] | None,
    *,
    device: torch.device = CPU,
    on_plan: Callable[[GroupingPlan], None],
    on_progress: OnProgress,
) -> OneShot:
    """Plan, convert and refit a network with calibration images, or group it by its norms without.

    `on_plan` is called with the plan before anything is converted. The networks come back on the CPU.
    """
    dense = network.model().to(device)
    small, example = copied(dense), torch.zeros(1, *network.image_shape, device=device)
    layers = select_layers(dense, sparsify).layers
    plan = one_shot_plan(small, sparsify.config(), calibration=batches, example_inputs=example, on_progress=on_progress)
    if batches is not None:
        plan = replace(plan, preprocessing=network.preprocessing)
    on_plan(plan)
    # Before the conversion: the summary shows the kept norm of each layer.
    sizes = summary(dense, example, plan=plan, rules=sparsify)
    lost_norm = 1 - kept_fraction(pruned_layers(dense, plan) if plan.narrowed else layers, plan)
    compress(small, plan, calibration=batches, on_progress=on_progress)
    return OneShot(
        dense=dense.cpu(),
        small=small.cpu(),
        plan=plan,
        lost_norm=lost_norm,
        sizes=sizes,
        importance={layer.name: importance_matrix(layer.weight) for layer in layers},
    )


def scored_classes(data: str, *, num_classes: int) -> int:
    """How many of a network's classes the images to score on show."""
    if names_a_function(data):
        return num_classes
    root = Path(data).expanduser()
    return sum(entry.is_dir() for entry in (test_folder(root) or root).iterdir())


def has_test_images(data: str) -> bool:
    """Whether there are images to score on in the data to compress with."""
    return names_a_function(data) or test_folder(Path(data).expanduser()) is not None


def finetuning_recipe(
    name: str,
    network: TrainedNetwork,
    data: str,
    val: str | None,
    *,
    epochs: int,
    sparsify: SparsifyRecipe,
    device: Device = "auto",
) -> Recipe:
    """A run that compresses trained weights with 256 of the images, and finetunes what is left.

    The dense network is the teacher where its outputs are the classes of the images; otherwise the classifier is new,
    and there is none. A batch has 32 images; fewer where they would be less than 16 batches, and up to 128 where they
    are still at least 500. The rate is 0.005 in proportion to the batch; with fewer than 500 steps it is lower by the
    square root of their share, because less time is left to settle. A GPU computes in bfloat16 where it can.

    Raises:
        FileNotFoundError: the folder has no images to learn from, or they have no classes.
    """
    if names_a_function(data):
        made = load_data(data, None)
        count, num_classes = len(made.train), made.num_classes
        options = DataRecipe(name=data)
    else:
        count, num_classes = _images_to_learn_from(Path(data).expanduser(), network)
        fits = num_classes == network.num_classes
        root, test = (None if each is None else str(Path(each).expanduser().absolute()) for each in (data, val))
        options = DataRecipe(name="folder", root=root, val=test, num_classes=num_classes if fits else None)
    batch_size = _batch_size(count)
    steps = epochs * math.ceil(count / batch_size)
    rate = RATE * batch_size / BATCH_SIZE * min(1.0, math.sqrt(steps / FULL_RATE_STEPS))
    on_gpu = device_for(device).type == "cuda"
    in_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    return Recipe(
        name=name,
        data=replace(
            options, batch_size=batch_size, image_size=network.preprocessing.size, resize=network.preprocessing.resize
        ),
        model=ModelRecipe(name=network.name, weights=network.weights),
        sparsify=replace(sparsify, calibration=min(CALIBRATION_IMAGES, count)),
        engine=EngineRecipe(device=device, precision="bf16" if in_bf16 else "32", channels_last=on_gpu),
        stage1=StageRecipe(epochs=0),
        finetune=FinetuneRecipe(teacher=WEIGHTS if num_classes == network.num_classes else None),
        stage2=StageRecipe(epochs=epochs, lr=float(f"{rate:.2g}"), weight_decay=1e-4, schedule="cosine", lr_warmup=0.1),
    )


def _batch_size(count: int) -> int:
    """Images per step for so many images.

    >>> [_batch_size(count) for count in (100, 10_000, 40_000, 1_000_000)]
    [6, 32, 64, 128]
    """
    larger = 1 << int(math.log2(max(count / MANY_BATCHES, 1)))
    return min(max(larger, BATCH_SIZE), max(count // FEWEST_BATCHES, 2), LARGEST_BATCH)


def _images_to_learn_from(root: Path, network: TrainedNetwork) -> tuple[int, int]:
    """How many there are, and how many classes they have: those of the network where they fit."""
    place = root / "train" if (root / "train").is_dir() else root
    if not place.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; give one with a folder of images for every class")
    split = FolderSplit(place, network.preprocessing, random=False, seed=0)
    fits = fits_outputs(split.classes, network.num_classes)
    return len(split), network.num_classes if fits else len(split.classes)
