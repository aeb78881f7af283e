"""What the kinds of runs do: structured sparsification, Network Slimming as its baseline, and dense training."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from strucspars.convert.ablation import reordered_plan, rescale_fresh_weights_
from strucspars.convert.compress import compress
from strucspars.convert.conversion import check_fits, convert_, model_plan
from strucspars.core.plan import GroupingPlan
from strucspars.export.storage import load, save
from strucspars.io.arrays import save_arrays
from strucspars.io.files import read_text, write_text
from strucspars.io.records import convert
from strucspars.models.weights import dense_state
from strucspars.nn.names import copied
from strucspars.sparsify.extensions import find_importance
from strucspars.sparsify.one_shot import one_shot_plan
from strucspars.sparsify.sparsifier import Sparsifier
from strucspars.train.checkpoint import load_named
from strucspars.train.epochs import CAPTURE_LOCK
from strucspars.train.recipe import FINETUNE, SLIM, SPARSIFY, TRAIN, FinetuneForm, Kind
from strucspars.train.recipe_identity import first_stage_changes
from strucspars.train.rules import HeldZerosRule, SlimmingRule, SparsifyRule, TrainingRule
from strucspars.train.run import SPARSIFIED, Run
from strucspars.train.run_folder import RunFolder
from strucspars.train.slimming import ChannelSelection, load_slimmed, save_slimmed, select_channels, slim_


class Procedure:
    """How a network is trained, made smaller, saved and read back.

    Attributes:
        first_stage: name of the stage before the compression; None where nothing is compressed.
        last_stage: name of the stage that ends in the saved network.
        is_cut_trainable: whether the last stage can continue with what `cut_` returns.
        decision_path: the file that says what remains of the network; None where everything does.
        form: how grouped layers are trained in the last stage; None where there are none.
    """

    first_stage: str | None = None
    last_stage = FINETUNE
    is_cut_trainable = False
    decision_path: Path | None = None
    form: FinetuneForm | None = None

    def __init__(self, run: Run) -> None:
        self._run = run

    def first_rule(self, model: nn.Module) -> TrainingRule | None:
        """The rule of the first stage; None if there is none to train. Refuses an unsuitable network or target now."""
        return None

    def note_start(self) -> None:
        """Record the network before the first stage."""

    def decide(self, model: nn.Module) -> dict[str, Any]:
        """Decide what to remove and store it; returns entries for the metrics."""
        raise NotImplementedError

    def recall(self) -> None:
        """Read the decision from the folder."""

    def cut_(self, model: nn.Module) -> nn.Module:
        """Remove what was decided from a trained network, to evaluate it before finetuning."""
        raise NotImplementedError

    def trainable(self, model: nn.Module) -> tuple[nn.Module, TrainingRule]:
        """The network of the last stage, and its rule."""
        return model, TrainingRule()

    def finish_(self, model: nn.Module) -> None:
        """Make the trained network the deployed one and save it."""
        if self._run.engine.is_first:
            plan = replace(model_plan(model), preprocessing=self._run.preprocessing)
            save(model, self._run.folder.model_path, plan=plan)

    def reload(self) -> nn.Module:
        """Read the saved network back."""
        return load(self._run.folder.model_path, self._run.fresh_model())


@final
class DenseTraining(Procedure):
    """No compression: the network that the others are compared with."""

    last_stage = TRAIN


@final
class StructuredSparsification(Procedure):
    """The paper's method."""

    first_stage = SPARSIFY
    # Zeroed, the network is still dense.
    is_cut_trainable = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.decision_path = run.folder.plan_path
        self._sparsifier: Sparsifier | None = None
        self._learned: GroupingPlan | None = None
        self._images: list[torch.Tensor] = []
        # Of `decide` or `recall`.
        self._plan: GroupingPlan

    @override
    def first_rule(self, model: nn.Module) -> TrainingRule | None:
        run = self._run
        if run.recipe.sparsify.from_run is not None:
            self._take_over_(model, run.recipe.sparsify.from_run)
            return None
        if run.given_plan is not None:
            check_fits(model, run.given_plan)
            self._learned = run.given_plan
            return None
        if run.recipe.sparsify.calibration and not run.recipe.stage1.epochs:
            self._images = run.calibration_images(run.recipe.sparsify.calibration)
            config = run.recipe.sparsify_config(steps_per_epoch=1)
            with CAPTURE_LOCK:
                self._learned = one_shot_plan(model, config, calibration=self._images, example_inputs=run.example)
            return None
        self._sparsifier = new_sparsifier(run, model)
        return SparsifyRule(self._sparsifier)

    @override
    def note_start(self) -> None:
        if self._run.checkpoint is None and self._sparsifier is not None:
            store_importance(self._run, self._sparsifier, "start")

    @override
    def decide(self, model: nn.Module) -> dict[str, Any]:
        learned = self._learned
        if learned is None:
            assert self._sparsifier is not None
            store_importance(self._run, self._sparsifier, "end")
            learned = self._sparsifier.plan()
        ablation = self._run.recipe.finetune.ablation
        self._plan = learned
        if ablation != "finetune" and ablation != "from-scratch":
            self._plan = reordered_plan(learned, ablation, seed=self._run.recipe.seed)
        self._plan = replace(self._plan, preprocessing=self._run.preprocessing)
        if self._run.engine.is_first:
            self._run.folder.save_plan(self._plan)
        return {
            "min_kept_norm": learned.min_kept_norm,
            "removed_param_fraction": learned.removed_param_fraction,
            "removed_mac_fraction": learned.removed_mac_fraction,
        }

    @override
    def recall(self) -> None:
        plan = self._run.folder.load_plan()
        if plan is None:
            raise ValueError(f"{self.decision_path} is missing, but the finetuning has begun; restore it")
        self._plan = plan

    @override
    def cut_(self, model: nn.Module) -> nn.Module:
        if self._images:
            small = copied(model)
            with CAPTURE_LOCK:
                compress(small, self._plan, calibration=self._images)
            model.load_state_dict(dense_state(small.state_dict(), self._plan, "the refitted network"))
            self._images = []
        HeldZerosRule(model, self._plan)
        return model

    @override
    def trainable(self, model: nn.Module) -> tuple[nn.Module, TrainingRule]:
        if self._run.recipe.finetune.ablation != "finetune":
            model = self._run.fresh_model("fresh weights of the ablation")
            rescale_fresh_weights_(model, self._plan)
        self.form = finetuning_form(self._run)
        if self.form == "masked":
            return model, HeldZerosRule(model, self._plan)
        return convert_(model, self._plan), TrainingRule()

    @override
    def finish_(self, model: nn.Module) -> None:
        convert_(model, self._plan)
        if self._run.engine.is_first:
            save(model, self._run.folder.model_path, plan=self._plan)

    def _take_over_(self, model: nn.Module, source: str) -> None:
        """Load weights and plan of a run that has trained the first stage that this recipe asks for too."""
        folder = RunFolder(Path(source).expanduser())
        saved, self._learned = load_named(folder.checkpoints, SPARSIFIED), folder.load_plan()
        if saved is None or self._learned is None:
            raise ValueError(
                f"sparsify.from_run: {source} is not a run that has finished its first stage; finish it, or name "
                "another"
            )
        if self._learned.min_kept_norm is None:
            raise ValueError(
                f"sparsify.from_run: {source} is an ablation, whose orders were not learned; name the run whose were"
            )
        asked = first_stage_changes(self._run.recipe, folder.load_recipe())
        if asked:
            raise ValueError(
                f"sparsify.from_run: {source} had another first stage than this recipe asks for, with "
                f"{', '.join(asked)}; change that to what is in its recipe.yaml, or leave from_run out"
            )
        self._run.check_classes_of(folder)
        try:
            model.load_state_dict(saved["model"])
        except (KeyError, TypeError, RuntimeError) as error:
            # Not all of PyTorch's message, which names every tensor.
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"sparsify.from_run: {source} belongs to another network: {reason}; name another, or leave it out"
            ) from error


@final
class ProgressiveSparsification(Procedure):
    """The method in one stage: decided early, annealed while training goes on, converted at the end."""

    last_stage = TRAIN
    form = "masked"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._sparsifier: Sparsifier | None = None

    @override
    def first_rule(self, model: nn.Module) -> None:
        if self._run.given_plan is not None:
            raise ValueError(
                f"model.weights: {self._run.recipe.model.weights} is compressed already, with nothing to decide; "
                "set sparsify.schedule=two-stage to finetune it, or give dense weights"
            )
        self._sparsifier = new_sparsifier(self._run, model)

    @override
    def trainable(self, model: nn.Module) -> tuple[nn.Module, TrainingRule]:
        if self._sparsifier is None:
            self._sparsifier = new_sparsifier(self._run, model)
        if self._run.checkpoint is None:
            store_importance(self._run, self._sparsifier, "start")
            if self._sparsifier.decided_plan is not None:
                self._store_decision(self._sparsifier.decided_plan)
        return model, SparsifyRule(self._sparsifier, self._store_decision)

    @override
    def finish_(self, model: nn.Module) -> None:
        assert self._sparsifier is not None, "trained before"
        # Not after `convert_`, which the Sparsifier would refuse.
        plan = replace(self._sparsifier.plan(), preprocessing=self._run.preprocessing)
        convert_(model, plan)
        if self._run.engine.is_first:
            # Again: a stop between decision and checkpoint, and then another machine, may have decided otherwise.
            self._run.folder.save_plan(plan)
            save(model, self._run.folder.model_path, plan=plan)

    def _store_decision(self, plan: GroupingPlan) -> None:
        assert self._sparsifier is not None, "it has decided"
        store_importance(self._run, self._sparsifier, "end")
        if self._run.engine.is_first:
            self._run.folder.save_plan(replace(plan, preprocessing=self._run.preprocessing))


def new_sparsifier(run: Run, model: nn.Module) -> Sparsifier:
    """The training state of the method for this network."""
    config = run.recipe.sparsify_config(steps_per_epoch=run.train.steps)
    count = run.recipe.sparsify.calibration
    # A resumed run has decided: its images would only be read for an importance.
    is_used = count and (run.checkpoint is None or find_importance(config.importance).needs)
    calibration = run.calibration_batches(count) if is_used else None
    # Counting operations sets the random state aside, from which other threads may be drawing weights.
    with CAPTURE_LOCK:
        return Sparsifier(model, config, calibration=calibration, example_inputs=run.example, executor=run.executor)


def store_importance(run: Run, sparsifier: Sparsifier, moment: str) -> None:
    """Save importance matrices and shapes of the layers for the report; half precision is enough for pictures."""
    if not run.engine.is_first:
        return
    layers = sparsifier.selection.layers
    matrices = {name: matrix.astype(np.float16) for name, matrix in sparsifier.importances().items()}
    save_arrays(run.folder.importance / f"{moment}.npz", matrices)
    shapes = [{"name": layer.name, "weight_shape": list(layer.weight_shape)} for layer in layers]
    run.folder.write_json(run.folder.path / "layers.json", shapes)


def finetuning_form(run: Run) -> FinetuneForm:
    """Masked or grouped, as the recipe says; `auto` is masked on a GPU and grouped on a CPU (decision 17).

    The folder stores the choice: rounding differs between the forms, so a run that changed it would be another run.
    """
    wanted, folder, engine = run.recipe.finetune.form, run.folder, run.engine
    if wanted != "auto":
        return wanted
    stored = folder.remembered("finetune_form") if engine.is_first else None
    hint = Literal["masked", "grouped"] | None
    form: FinetuneForm | None = convert(hint, stored, str(folder.decisions_path), "finetune_form")
    form = engine.fabric.broadcast(form)
    if form is None:
        form = "masked" if engine.device.type == "cuda" else "grouped"
        if engine.is_first:
            folder.remember("finetune_form", form)
    return form


@final
class NetworkSlimming(Procedure):
    """The baseline of the paper's tables (Liu et al., 2017)."""

    first_stage = SLIM

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._path = self.decision_path = run.folder.path / "selection.json"
        # Of `decide` or `recall`.
        self._selection: ChannelSelection

    @override
    def first_rule(self, model: nn.Module) -> TrainingRule:
        options = self._run.recipe.slimming
        select_channels(model, target=options.target)
        return SlimmingRule(model, options.strength)

    @override
    def decide(self, model: nn.Module) -> dict[str, Any]:
        target, example = self._run.recipe.slimming.target, self._run.example
        # Counting operations sets the random state aside, from which other threads may be drawing weights.
        with CAPTURE_LOCK:
            self._selection = select_channels(model, target=target, example_inputs=example)
        if self._run.engine.is_first:
            write_text(self._path, self._selection.to_json() + "\n")
        return {"removed_channel_fraction": self._selection.removed_channel_fraction}

    @override
    def recall(self) -> None:
        if not self._path.exists():
            raise ValueError(f"{self._path} is missing, but the finetuning has begun; restore it")
        self._selection = ChannelSelection.from_json(read_text(self._path), str(self._path))

    @override
    def cut_(self, model: nn.Module) -> nn.Module:
        return slim_(model, self._selection)

    @override
    def trainable(self, model: nn.Module) -> tuple[nn.Module, TrainingRule]:
        return self.cut_(model), TrainingRule()

    @override
    def finish_(self, model: nn.Module) -> None:
        if self._run.engine.is_first:
            save_slimmed(model, self._selection, self._run.folder.model_path)

    @override
    def reload(self) -> nn.Module:
        return load_slimmed(self._run.folder.model_path, self._run.fresh_model())


PROCEDURES: dict[Kind, Callable[[Run], Procedure]] = {
    "strucspars": StructuredSparsification,
    "slimming": NetworkSlimming,
    "dense": DenseTraining,
}


def procedure_of(run: Run) -> Procedure:
    """What the run's recipe asks for."""
    return ProgressiveSparsification(run) if run.recipe.is_progressive else PROCEDURES[run.recipe.kind](run)
