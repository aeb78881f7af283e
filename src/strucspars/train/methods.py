"""The two ways to make a network smaller: structured sparsification, and the baseline it is compared with."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from strucspars.convert.conversion import convert_
from strucspars.core.plan import GroupingPlan
from strucspars.export.storage import load, plan_hash, save
from strucspars.io.arrays import save_arrays
from strucspars.io.files import read_text, write_text
from strucspars.prune.narrowing import ChannelSelection, load_slimmed, save_slimmed, slim_
from strucspars.prune.slimming import select_channels
from strucspars.sparsify.extensions import importance_of
from strucspars.sparsify.sparsifier import Sparsifier
from strucspars.train.compression import FORMS, TrainableForm, ablation_plan, masked_form, with_fresh_weights
from strucspars.train.recipe import SLIM, SPARSIFY, Form, Kind, Recipe
from strucspars.train.recipe_identity import first_stage_changes
from strucspars.train.rules import PlainRule, SlimmingRule, SparsifyRule, TrainingRule
from strucspars.train.run_folder import RunFolder
from strucspars.train.steps import CAPTURE_LOCK


@dataclass(frozen=True, eq=False, kw_only=True)
class Workshop:
    """What a method works with.

    Attributes:
        build: makes the recipe's network with fresh weights, on the device.
        build_other: the same with other fresh weights.
        example: one image of zeros, to count operations with.
        steps_per_epoch: optimizer steps.
        executor: workers that learn channel orders, if any.
        is_first: whether this process writes files.
        is_resumed: whether there is a checkpoint to go on from.
    """

    recipe: Recipe
    folder: RunFolder
    build: Callable[[], nn.Module]
    build_other: Callable[[], nn.Module]
    example: torch.Tensor
    steps_per_epoch: int
    executor: Executor | None
    is_first: bool
    is_resumed: bool


class Deployment(Protocol):
    """How a network is trained last, saved, and read back.

    Attributes:
        plan: of the groups; None where there are none.
        decision_path: where it is written what stays of the network; None where all of it does.
    """

    plan: GroupingPlan | None
    decision_path: Path | None

    def decision_digest(self) -> str | None:
        """SHA-256 of what stays, by which a stage knows the decision that it began with; None where all of it does."""

    def trainable(self, model: nn.Module, form: Form | None) -> TrainableForm:
        """The network as the last stage trains it."""

    def finish(self, model: nn.Module) -> nn.Module:
        """The trained network as it is deployed; writes it to the folder."""

    def reload(self) -> nn.Module:
        """The deployed network, read from the folder."""


class CompressionMethod(Deployment, Protocol):
    """Trains a network so that much of it can go, decides what goes, and lets it go."""

    first_stage: str

    def first_rule(self, model: nn.Module) -> TrainingRule | None:
        """What the first stage does in every step and after every epoch; None where another run has trained it.

        What cannot work is refused here; nothing is written.
        """

    def note_start(self) -> None:
        """Write down what the network is like before the first stage."""

    def decide(self, model: nn.Module) -> dict[str, Any]:
        """Decide what goes and write it down; returns what the metrics should say about it."""

    def recall(self) -> None:
        """Take the decision from the folder."""

    def cut_(self, model: nn.Module) -> nn.Module:
        """Drop what goes from a trained network, for a look at it before finetuning."""


class StructuredSparsification:
    """The paper's method."""

    first_stage = SPARSIFY

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._sparsifier: Sparsifier | None = None
        self._plan_of_another_run: GroupingPlan | None = None
        self.plan: GroupingPlan | None = None
        self.decision_path: Path | None = workshop.folder.plan_path

    def first_rule(self, model: nn.Module) -> TrainingRule | None:
        """The structured penalty; learns the first channel orders, unless another run has."""
        recipe = self._workshop.recipe
        if recipe.sparsify.from_run is not None:
            self._plan_of_another_run = _learned_plan(recipe, recipe.sparsify.from_run)
            return None
        # Counting operations sets the random state aside, from which other threads may be drawing weights.
        with CAPTURE_LOCK:
            self._sparsifier = Sparsifier(
                model,
                recipe.sparsify_config(steps_per_epoch=self._workshop.steps_per_epoch),
                example_inputs=self._workshop.example,
                executor=self._workshop.executor,
            )
        return SparsifyRule(self._sparsifier)

    def note_start(self) -> None:
        """The importance of what training starts from, once."""
        if not self._workshop.is_resumed:
            self._store_importance("start")

    def decide(self, model: nn.Module) -> dict[str, Any]:
        """Search the threshold that meets the target, from the weights as they are now."""
        learned = self._plan_of_another_run
        if learned is None:
            assert self._sparsifier is not None
            self._store_importance("end")
            learned = self._sparsifier.plan()
        recipe = self._workshop.recipe
        self.plan = ablation_plan(learned, recipe.finetune.ablation, seed=recipe.seed)
        if self._workshop.is_first:
            self._workshop.folder.save_plan(self.plan)
        return {
            "min_kept_norm": learned.min_kept_norm,
            "removed_param_fraction": learned.removed_param_fraction,
            "removed_mac_fraction": learned.removed_mac_fraction,
        }

    def recall(self) -> None:
        """Take the plan from the folder."""
        self.plan = self._workshop.folder.load_plan()
        if self.plan is None:
            raise ValueError(f"{self._workshop.folder.plan_path} is missing, but the finetuning has begun; restore it")

    def decision_digest(self) -> str:
        """Of groups and orders."""
        return plan_hash(self._decided())

    def cut_(self, model: nn.Module) -> nn.Module:
        """Zero what the plan prunes."""
        return masked_form(model, self._decided()).model

    def trainable(self, model: nn.Module, form: Form | None) -> TrainableForm:
        """Masked or grouped, with inherited or fresh weights."""
        plan = self._decided()
        if self._workshop.recipe.finetune.ablation != "finetune":
            model = with_fresh_weights(self._workshop.build_other, plan)
        assert form is not None
        return FORMS[form](model, plan)

    def finish(self, model: nn.Module) -> nn.Module:
        """Real group convolutions, saved with their plan."""
        convert_(model, self._decided())
        if self._workshop.is_first:
            save(model, self._workshop.folder.model_path, plan=self._decided())
        return model

    def reload(self) -> nn.Module:
        """Read the saved network back."""
        return load(self._workshop.folder.model_path, self._workshop.build())

    def _decided(self) -> GroupingPlan:
        assert self.plan is not None, "decide or recall comes first"
        return self.plan

    def _store_importance(self, moment: str) -> None:
        """The importance matrices as a report shows them; half precision is plenty for a picture."""
        path = self._workshop.folder.importance / f"{moment}.npz"
        if not self._workshop.is_first or self._sparsifier is None:
            return
        layers = self._sparsifier.selection.layers
        name = self._workshop.recipe.sparsify.importance
        save_arrays(path, {layer.name: importance_of(layer, name).astype(np.float16) for layer in layers})
        shapes = [{"name": layer.name, "weight_shape": list(layer.weight_shape)} for layer in layers]
        self._workshop.folder.write_json(self._workshop.folder.path / "layers.json", shapes)


def _learned_plan(recipe: Recipe, source: str) -> GroupingPlan:
    """The plan that the run in `source` has learned in a first stage as the recipe's."""
    folder = RunFolder(Path(source).expanduser())
    plan = folder.load_plan()
    if plan is None:
        raise ValueError(f"sparsify.from_run: {source} has no plan yet; finish its first stage")
    if plan.min_kept_norm is None:
        raise ValueError(
            f"sparsify.from_run: {source} is an ablation, whose orders were not learned; name the run whose were"
        )
    asked = first_stage_changes(recipe, folder.load_recipe())
    if asked:
        raise ValueError(
            f"sparsify.from_run: {source} had another first stage than this recipe asks for, with "
            f"{', '.join(asked)}; change that to what is in its recipe.yaml, or leave from_run out"
        )
    return plan


class NetworkSlimming:
    """Liu et al. (2017): the baseline of the paper's tables."""

    first_stage = SLIM
    plan: GroupingPlan | None = None

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._path = workshop.folder.path / "selection.json"
        self.decision_path: Path | None = self._path
        self.selection: ChannelSelection | None = None

    def first_rule(self, model: nn.Module) -> TrainingRule:
        """L1 on the batch-norm scales."""
        options = self._workshop.recipe.slimming
        # A network or a target that does not do fails here, not when the training is over.
        select_channels(model, target=options.target)
        return SlimmingRule(model, options.strength)

    def note_start(self) -> None:
        """Nothing that a report would show."""

    def decide(self, model: nn.Module) -> dict[str, Any]:
        """One threshold for all batch-norm scales that meets the target."""
        # Counting operations sets the random state aside, from which other threads may be drawing weights.
        with CAPTURE_LOCK:
            target, example = self._workshop.recipe.slimming.target, self._workshop.example
            self.selection = select_channels(model, target=target, example_inputs=example)
        if self._workshop.is_first:
            write_text(self._path, self.selection.to_json() + "\n")
        return {"removed_channel_fraction": self.selection.removed_channel_fraction}

    def recall(self) -> None:
        """Take the selection from the folder."""
        if not self._path.exists():
            raise ValueError(f"{self._path} is missing, but the finetuning has begun; restore it")
        self.selection = ChannelSelection.from_json(read_text(self._path), str(self._path))

    def decision_digest(self) -> str:
        """Of the channels that stay."""
        return self._decided().digest()

    def cut_(self, model: nn.Module) -> nn.Module:
        """Drop the channels."""
        return slim_(model, self._decided())

    def trainable(self, model: nn.Module, form: Form | None) -> TrainableForm:
        """Narrow; there is no other form."""
        return TrainableForm(slim_(model, self._decided()), PlainRule())

    def finish(self, model: nn.Module) -> nn.Module:
        """Narrow already; saved with its selection."""
        if self._workshop.is_first:
            save_slimmed(model, self._decided(), self._workshop.folder.model_path)
        return model

    def reload(self) -> nn.Module:
        """Read the saved network back."""
        return load_slimmed(self._workshop.folder.model_path, self._workshop.build())

    def _decided(self) -> ChannelSelection:
        assert self.selection is not None, "decide or recall comes first"
        return self.selection


class DenseTraining:
    """No compression: the network that the others are compared with."""

    plan: GroupingPlan | None = None
    decision_path: Path | None = None

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop

    def decision_digest(self) -> None:
        """Nothing was decided."""

    def trainable(self, model: nn.Module, form: Form | None) -> TrainableForm:
        """The network as it is."""
        return TrainableForm(model, PlainRule())

    def finish(self, model: nn.Module) -> nn.Module:
        """Saved as it is."""
        if self._workshop.is_first:
            save(model, self._workshop.folder.model_path)
        return model

    def reload(self) -> nn.Module:
        """Read the saved network back."""
        return load(self._workshop.folder.model_path, self._workshop.build())


COMPRESSION_METHODS: dict[Kind, Callable[[Workshop], CompressionMethod]] = {
    "strucspars": StructuredSparsification,
    "slimming": NetworkSlimming,
}
