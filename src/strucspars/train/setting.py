"""What a recipe names, made real: data, networks, and a teacher to learn from."""

import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strucspars.data.batches import Batches
from strucspars.data.catalogue import batches_of, load_data
from strucspars.data.folder import FolderData
from strucspars.export.storage import load
from strucspars.models.catalogue import build_model, names_a_function
from strucspars.models.weights import load_weights_
from strucspars.train.engine import Engine
from strucspars.train.loss import Distillation, StageLoss
from strucspars.train.recipe import Recipe, StageRecipe
from strucspars.train.run_folder import RunFolder, check_same_classes
from strucspars.train.stage import derived_seed
from strucspars.train.steps import CAPTURE_LOCK

MOST_READERS = 4


class Setting:
    """The data and networks of one run, on its device."""

    def __init__(self, recipe: Recipe, engine: Engine) -> None:
        self.recipe, self.engine = recipe, engine
        options = recipe.data
        root = None if options.root is None else Path(options.root).expanduser()
        self._data = load_data(
            options.name, root, download=options.download, image_size=options.image_size, seed=recipe.seed
        )
        if options.batch_size % engine.world_size:
            raise ValueError(f"data.batch_size {options.batch_size} cannot be shared by {engine.world_size} processes")
        self.test = self._batches(training=False)

    @cached_property
    def train(self) -> Batches:
        """Batches to learn from; an evaluation asks for none.

        Raises:
            ValueError: there are fewer images than a batch has.
        """
        batch_size, count = self.recipe.data.batch_size, len(self._data.train)
        if batch_size > count:
            raise ValueError(
                f"data.batch_size {batch_size} is more than the {count} images to learn from; give at most {count}, or "
                "more images"
            )
        return self._batches(training=True)

    def _batches(self, *, training: bool) -> Batches:
        options, engine = self.recipe.data, self.engine
        count = len(self._data.train if training else self._data.test)
        return batches_of(
            self._data,
            training=training,
            # No more than there are: an evaluation takes memory for what fills up a batch, and does not count it.
            batch_size=math.ceil(min(options.batch_size, count) / engine.world_size),
            device=engine.device,
            seed=self.recipe.seed,
            workers=default_readers() if options.workers is None else options.workers,
            rank=engine.rank,
            world_size=engine.world_size,
            memory_format=engine.memory_format,
        )

    @property
    def example(self) -> torch.Tensor:
        """One image of zeros, to count operations with."""
        return torch.zeros(1, *self._data.image_shape, device=self.engine.device)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes of an image folder, in the order of the labels; None where they are fixed."""
        return self._data.classes if isinstance(self._data, FolderData) else None

    def check_classes_of(self, folder: RunFolder) -> None:
        """Refuse a run whose network means other classes than these data.

        Raises:
            ValueError: names the first class that differs.
        """
        check_same_classes(folder, self.classes, data=f"data.root {self.recipe.data.root}")

    @property
    def images(self) -> dict[str, int | str] | None:
        """Which images lie in an image folder, for checkpoints; None where they are fixed."""
        return self._data.listing() if isinstance(self._data, FolderData) else None

    def check_images_of(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse to go on with other images than before: order, crops and steps of the epochs would be others.

        Raises:
            ValueError: names how many there were and are.
        """
        # Checkpoints of before know of none.
        before, now = checkpoint.get("images"), self.images
        if before is None or now is None or before == now:
            return
        counts = [
            f"{listing.get('train_images')} to learn from and {listing.get('test_images')} to test on"
            for listing in (before, now)
        ]
        change = (
            f"{counts[0]}, now {counts[1]}" if counts[0] != counts[1] else f"{counts[0]}, of other names or classes"
        )
        raise ValueError(
            f"data.root {self.recipe.data.root} holds other images than when the run began, so it would become another "
            f"run: there were {change}; give the images of that run, or start another one in another folder"
        )

    def fresh_model(self) -> nn.Module:
        """The recipe's network with fresh weights, on the device; the same ones every time."""
        return self._built(self.recipe, "weights")

    def other_fresh_model(self) -> nn.Module:
        """The same network with other fresh weights: what an ablation starts from."""
        return self._built(self.recipe, "fresh weights of the ablation")

    def first_model(self) -> nn.Module:
        """What training starts from: fresh weights, or those that the recipe names."""
        model = self.fresh_model()
        if self.recipe.model.weights is not None:
            load_weights_(model, self.recipe.model.weights, self.recipe.model.name)
        return model

    def second_stage_loss(self) -> StageLoss:
        """Cross-entropy, and the teacher if there is one."""
        return self.loss(self.recipe.stage2, self._distillation())

    def loss(self, options: StageRecipe, distillation: Distillation | None = None) -> StageLoss:
        """The loss of a stage."""
        return StageLoss(label_smoothing=options.label_smoothing, distillation=distillation)

    def _distillation(self) -> Distillation | None:
        options = self.recipe.finetune
        if options.teacher is None:
            return None
        folder = RunFolder(Path(options.teacher).expanduser())
        if not folder.is_finished:
            raise ValueError(
                f"finetune.teacher: {folder.path} is not the folder of a finished run; train the teacher first, "
                "or name the folder of one"
            )
        recipe = folder.load_recipe()
        if recipe.kind == "slimming":
            raise ValueError(f"finetune.teacher: {folder.path} is a run of kind slimming; name a dense one")
        if _labels_of(recipe.data.name) != _labels_of(self.recipe.data.name):
            raise ValueError(
                f"finetune.teacher: {folder.path} was trained on {recipe.data.name}, this run learns from "
                f"{self.recipe.data.name}: what its outputs mean is something else; name a teacher of the same data"
            )
        if names_a_function(recipe.model.name) and recipe.model.name != self.recipe.model.name:
            raise ValueError(
                f"finetune.teacher: {folder.path} names {recipe.model.name!r} as its network; code that a folder names "
                "is not run unless the recipe names the same"
            )
        self.check_classes_of(folder)
        teacher = load(folder.model_path, self._built(recipe, "weights"))
        teacher.eval().requires_grad_(False)
        return Distillation(teacher=teacher, weight=options.distill_weight, temperature=options.distill_temperature)

    def _built(self, recipe: Recipe, purpose: str) -> nn.Module:
        # Runs in other threads share the generator that initialises weights.
        with CAPTURE_LOCK:
            torch.manual_seed(derived_seed(self.recipe.seed, purpose))
            model = build_model(
                recipe.model.name, num_classes=self._data.num_classes, image_shape=self._data.image_shape
            )
        return self.engine.placed(model)


def _labels_of(data: str) -> str:
    """What the labels of a data set are: those of image folders, by whatever name, are the classes that they store."""
    return "classes" if data in ("imagenet", "folder") else data


def default_readers() -> int:
    """One process per core that this one may use, its share of them under torchrun, and no more than `MOST_READERS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return min(MOST_READERS, max(1, cores // local_processes))
