"""The parts of a run in progress: its recipe and folder, its engine, its data and its networks."""

import itertools
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import nn

from strucspars.core.plan import GroupingPlan, Preprocessing
from strucspars.data.batches import Batches
from strucspars.data.catalogue import batches_of, load_data
from strucspars.data.folder import FolderData, FolderSplit
from strucspars.data.image_set import ImageSet, ResidentData
from strucspars.export.storage import load, read_plan
from strucspars.models.catalogue import build_model, names_a_function
from strucspars.models.preprocessing import preprocessing_of, usual_resize
from strucspars.models.weights import load_weights_
from strucspars.train.engine import Engine
from strucspars.train.epochs import CAPTURE_LOCK
from strucspars.train.observer import RunFailed, RunObserver
from strucspars.train.recipe import WEIGHTS, Recipe
from strucspars.train.run_folder import RunFolder, check_same_classes
from strucspars.train.steps import StageLoss

# Name of the checkpoint after the first stage.
SPARSIFIED = "sparsified"
# No more than four processes read images unless the recipe asks for them.
MOST_READERS = 4
# Several processes stop together; they agree on it every so many steps.
STEPS_BETWEEN_AGREEMENTS = 50


class RunInterrupted(Exception):
    """The run was asked to stop; everything is saved, and the same command resumes."""


class TrainingDiverged(RunFailed):
    """The loss is not finite any more; the last good checkpoint is kept."""


def derived_seed(seed: int, purpose: str, number: int = 0) -> int:
    """A seed for one purpose of a run, such as the dropout of its epoch 7; different purposes are independent.

    >>> derived_seed(0, "weights") == derived_seed(0, "weights") != derived_seed(1, "weights")
    True
    """
    words = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), number]).generate_state(2)
    return int(words[0]) << 31 | int(words[1]) >> 1


@final
class Run:
    """One run; its arguments are those of `run_pipeline`. Data are loaded when first used."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        *,
        observers: Sequence[RunObserver] = (),
        should_stop: Callable[[], bool] = lambda: False,
        executor: Executor | None = None,
    ) -> None:
        self.recipe, self.folder, self.name = recipe, folder, folder.path.name
        self.observers = list(observers)
        self.should_stop, self.executor = should_stop, executor
        self.checkpoint: Mapping[str, Any] | None = None
        with CAPTURE_LOCK:
            self.engine = Engine(recipe.engine)

    def has_begun(self, stage: str) -> bool:
        """Whether the checkpoint is one of this stage."""
        return self.checkpoint is not None and self.checkpoint["stage"] == stage

    def stop_question(self) -> Callable[[], bool]:
        """The function that says after every step whether to stop; all processes get the same answer."""
        if self.engine.world_size == 1:
            return self.should_stop
        asked = itertools.count(1)
        return lambda: next(asked) % STEPS_BETWEEN_AGREEMENTS == 0 and self.engine.any_true(self.should_stop())

    @cached_property
    def _data(self) -> ResidentData | FolderData:
        options = self.recipe.data
        if options.batch_size % self.engine.world_size:
            processes = self.engine.world_size
            raise ValueError(f"data.batch_size {options.batch_size} cannot be shared by {processes} processes")
        root, val = (None if each is None else Path(each).expanduser() for each in (options.root, options.val))
        data = load_data(
            options.name,
            root,
            val=val,
            download=options.download,
            preprocessing=wanted_preprocessing(self.recipe),
            seed=self.recipe.seed,
            num_classes=options.num_classes,
        )
        if isinstance(data, ResidentData) and options.mean is not None and options.std is not None:
            return replace(data, mean=options.mean, std=options.std)
        return data

    @property
    def preprocessing(self) -> Preprocessing | None:
        """Of the images; None where a function of the user makes them."""
        return self._data.preprocessing

    @cached_property
    def train(self) -> Batches:
        """Batches to learn from."""
        batch_size, count = self.recipe.data.batch_size, len(self._data.train)
        if batch_size > count:
            remedy = f"give at most {count}, or more images"
            raise ValueError(f"data.batch_size {batch_size} is more than the {count} images to learn from; {remedy}")
        return self._batches(training=True)

    @cached_property
    def test(self) -> Batches:
        """Batches to evaluate with."""
        return self._batches(training=False)

    def _batches(self, *, training: bool) -> Batches:
        options, engine = self.recipe.data, self.engine
        count = len(self._data.train if training else self._data.test)
        return batches_of(
            self._data,
            training=training,
            # An evaluation fills its last batch up: with few images, a full batch would be a waste of memory.
            batch_size=math.ceil(min(options.batch_size, count) / engine.world_size),
            device=engine.device,
            seed=self.recipe.seed,
            workers=default_readers() if options.workers is None else options.workers,
            rank=engine.rank,
            world_size=engine.world_size,
            memory_format=engine.memory_format,
        )

    def calibration_images(self, count: int) -> list[torch.Tensor]:
        """Images of the first epoch to learn from, in batches."""
        if self.engine.world_size > 1:
            raise ValueError("sparsify.calibration without a first stage is for one process; start without torchrun")
        return [images for images, _ in self.calibration_batches(count)]

    def calibration_batches(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Images of the first epoch to learn from and their labels, in batches; with several processes, a share."""
        steps = math.ceil(count / self.train.batch_size)
        batches = itertools.islice(self.train.epoch(1), steps)
        return [(batch.images.clone(), batch.labels.clone()) for batch in batches]

    @property
    def example(self) -> torch.Tensor:
        """One image of zeros, to count operations with."""
        return torch.zeros(1, *self._data.image_shape, device=self.engine.device)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes of an image folder in the order of the labels; None where they are fixed."""
        return self._data.classes if isinstance(self._data, FolderData) else None

    @cached_property
    def images(self) -> dict[str, int | str] | None:
        """Which images an image folder holds, for checkpoints; None where they are fixed."""
        return self._data.listing() if isinstance(self._data, FolderData) else None

    def check_classes_of(self, folder: RunFolder) -> None:
        """Refuse a run whose network has other classes than these data."""
        check_same_classes(folder, self.classes, data=f"data.root {self.recipe.data.root}")

    def check_images_of(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse to resume with other images: order, crops and steps of the epochs would differ."""
        if checkpoint["images"] != self.images:
            counts = [
                each and f"{each['train_images']} to learn from and {each['test_images']} to test on"
                for each in (checkpoint["images"], self.images)
            ]
            change = f"now {counts[1]}" if counts[0] != counts[1] else "of other names or classes"
            raise ValueError(
                f"data.root {self.recipe.data.root} holds other images than when the run began: there were {counts[0]},"
                f" {change}; give the images of that run, or start another one in another folder"
            )

    def fresh_model(self, purpose: str = "weights", *, name: str | None = None) -> nn.Module:
        """The recipe's network, or the one named, with fresh weights; the same weights for the same purpose."""
        # Runs in other threads share the generator that initialises weights.
        with CAPTURE_LOCK:
            torch.manual_seed(derived_seed(self.recipe.seed, purpose))
            name, data = name or self.recipe.model.name, self._data
            model = build_model(name, num_classes=data.num_classes, image_shape=data.image_shape)
        return self.engine.placed(model)

    @cached_property
    def given_plan(self) -> GroupingPlan | None:
        """The plan of a compressed network whose weights the recipe names; it is finetuned, without a first stage."""
        weights = self.recipe.model.weights
        plan = None if weights is None else read_plan(Path(weights).expanduser())
        return plan if plan is not None and any(layer.group_level > 1 for layer in plan.layers.values()) else None

    def first_model(self) -> nn.Module:
        """The network that training starts from: fresh, or with the weights that the recipe names."""
        model = self.fresh_model()
        if self.given_plan is not None and self.recipe.kind != "strucspars":
            raise ValueError(
                f"model.weights: {self.recipe.model.weights} is compressed already, and a run of kind "
                f"{self.recipe.kind} would fill its zeros again; finetune it with kind=strucspars, or give dense ones"
            )
        if self.recipe.model.weights is not None:
            load_weights_(model, self.recipe.model.weights, self.recipe.model.name)
        return model

    def last_loss(self) -> StageLoss:
        """The loss of the last stage, with the recipe's teacher if it names one."""
        options, teacher = self.recipe.finetune, None
        if options.teacher is not None:
            network = self._dense_model() if options.teacher == WEIGHTS else self._trained_teacher(options.teacher)
            teacher = network.eval().requires_grad_(False)
        return StageLoss(
            label_smoothing=self.recipe.stage2.label_smoothing,
            teacher=teacher,
            shown=None if teacher is None else self._shown_outputs(),
            weight=options.distill_weight,
            temperature=options.distill_temperature,
        )

    def _trained_teacher(self, named: str) -> nn.Module:
        """The network of a finished run."""
        folder = RunFolder(Path(named).expanduser())
        if not folder.is_finished:
            raise ValueError(
                f"finetune.teacher: {folder.path} is not the folder of a finished run; train the teacher first, "
                "or name the folder of one"
            )
        teacher, own = folder.load_recipe(), self.recipe
        # Image folders under any name have the classes that they store; other data sets have labels of their own.
        label_sets = {
            "classes" if each in ("imagenet", "folder") else each for each in (teacher.data.name, own.data.name)
        }
        problem = ""
        if teacher.kind == "slimming":
            problem = "is a run of kind slimming; name a dense one"
        elif len(label_sets) > 1:
            problem = (
                f"was trained on {teacher.data.name}, this run learns from {own.data.name}: its outputs mean something "
                "else; name a teacher of the same data"
            )
        elif names_a_function(teacher.model.name) and teacher.model.name != own.model.name:
            problem = (
                f"names {teacher.model.name!r} as its network; code that a folder names is not run unless the recipe "
                "names the same"
            )
        if problem:
            raise ValueError(f"finetune.teacher: {folder.path} {problem}")
        self.check_classes_of(folder)
        return load(folder.model_path, self.fresh_model(name=teacher.model.name))

    def _shown_outputs(self) -> torch.Tensor | None:
        """The outputs whose classes the images to learn from show; None for all, or where only reading would tell."""
        train = self._data.train
        if isinstance(train, FolderSplit):
            shown = torch.from_numpy(train.shown_labels)
        elif isinstance(train, ImageSet):
            shown = train.labels.bincount().nonzero().flatten()
        else:
            return None
        return None if len(shown) == self._data.num_classes else shown.to(self.engine.device)

    def _dense_model(self) -> nn.Module:
        """The network of the recipe's weights before anything is removed."""
        weights = self.recipe.model.weights
        if weights is None or self.given_plan is not None:
            raise ValueError(
                f"finetune.teacher is {WEIGHTS}, the network of model.weights, but that is {weights or 'not named'}"
                f"{' and compressed already' if weights else ''}; name the folder of a finished dense run"
            )
        model = self.fresh_model()
        load_weights_(model, weights, self.recipe.model.name, with_classifier=True)
        return model


def wanted_preprocessing(recipe: Recipe) -> Preprocessing:
    """The preprocessing of an image folder: from the recipe, else from the network's metadata."""
    options = recipe.data
    known = preprocessing_of(recipe.model.name, recipe.model.weights)
    shortest = usual_resize(known.size) if known.resize is None else known.resize
    return Preprocessing(
        mean=known.mean if options.mean is None else options.mean,
        std=known.std if options.std is None else options.std,
        size=options.image_size,
        resize=round(options.image_size * shortest / known.size) if options.resize is None else options.resize,
        interpolation=known.interpolation,
    )


def default_readers() -> int:
    """One process per core of this process, divided among those of torchrun, and at most `MOST_READERS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return min(MOST_READERS, max(1, cores // local_processes))
