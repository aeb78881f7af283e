"""From a recipe to a finished folder: what is in it, how runs build on each other, and what is refused."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.core.importance import Norm
from strucspars.core.permutation import inverse
from strucspars.cost.counting import count_macs
from strucspars.data.batches import Batch, ResidentBatches
from strucspars.data.catalogue import digits
from strucspars.io.arrays import load_arrays
from strucspars.models.catalogue import build_model
from strucspars.nn.importance import importance_matrix
from strucspars.nn.layers import kept_connections
from strucspars.train import pipeline, procedures
from strucspars.train.checkpoint import load_named
from strucspars.train.observer import RunObserver
from strucspars.train.outcome import RunSummary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run import Run, RunInterrupted, derived_seed
from strucspars.train.run_folder import RunFolder
from strucspars.train.slimming import ChannelSelection, load_slimmed

Recipes = Callable[..., Recipe]
IMAGE_SHAPE = (3, 16, 16)
# So low a rate leaves weights where they were.
STANDSTILL = ("stage2.epochs=1", "stage2.lr=1e-30", "stage2.weight_decay=0")


class Listener(RunObserver):
    """Remembers which stages it was told of."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.rows: list[Mapping[str, Any]] = []

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        self.stages.append(stage)

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        self.rows.append(row)


def network(name: str = "small_networks:plain") -> nn.Module:
    return build_model(name, num_classes=10, image_shape=IMAGE_SHAPE)


@pytest.fixture(scope="module")
def base(small_recipe: Recipes, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run."""
    folder = RunFolder(tmp_path_factory.mktemp("base") / "run")
    run_pipeline(small_recipe(), folder.path)
    return folder


@pytest.fixture(scope="module")
def summary(base: RunFolder) -> RunSummary:
    return RunSummary.from_json(json.loads(base.summary_json_path.read_text()))


def test_the_summarys_sizes_are_those_of_the_saved_network(base: RunFolder, summary: RunSummary) -> None:
    dense, small = network(), ss.load(base.model_path, network())
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (dense, small)]
    assert [summary.params.before, summary.params.after] == sizes
    assert summary.removed_param_fraction == pytest.approx(1 - sizes[1] / sizes[0])
    assert summary.removed_param_fraction >= 0.4
    counts = [count_macs(model, torch.zeros(1, *IMAGE_SHAPE)).macs for model in (dense, small)]
    assert [summary.macs.before, summary.macs.after] == counts
    assert summary.removed_mac_fraction == pytest.approx(1 - counts[1] / counts[0])
    plan = base.load_plan()
    assert plan is not None
    assert summary.removed_param_fraction == pytest.approx(plan.removed_param_fraction)
    assert summary.min_kept_norm == plan.min_kept_norm


def test_the_summarys_accuracies_are_those_of_the_metrics_and_of_the_saved_network(
    base: RunFolder, summary: RunSummary
) -> None:
    data = digits()
    pixels = data.test.images.float() / 255
    images = (pixels - torch.tensor(data.mean).view(3, 1, 1)) / torch.tensor(data.std).view(3, 1, 1)
    small = ss.load(base.model_path, network()).eval()
    with torch.no_grad():
        right = small(images).argmax(dim=1) == data.test.labels
    assert summary.converted_top1 == right.double().mean().item() == summary.finetuned.last_top1
    rows = {(row["stage"], row["epoch"]): row for row in base.metrics()}
    assert list(rows) == [("sparsify", 1), ("sparsify", 2), ("compress", 0), ("finetune", 1), ("finetune", 2)]
    assert summary.sparsified is not None
    assert summary.sparsified.last_top1 == rows["sparsify", 2]["test_top1"] == summary.before_compression_top1
    assert summary.compressed_top1 == rows["compress", 0]["test_top1"]
    assert summary.finetuned.best_top1 == max(rows["finetune", epoch]["test_top1"] for epoch in (1, 2))


def test_a_run_folder_holds_all_that_later_steps_need(
    base: RunFolder, small_recipe: Recipes, summary: RunSummary
) -> None:
    assert read_recipe(base.recipe_path) == small_recipe()
    assert torch.__version__.startswith(json.loads(base.environment_path.read_text())["versions"]["torch"])
    layers = {layer["name"]: layer["weight_shape"] for layer in json.loads((base.path / "layers.json").read_text())}
    assert layers == {"3": [16, 16, 3, 3], "6": [16, 16, 3, 3]}
    start, end = (load_arrays(base.importance / f"{moment}.npz") for moment in ("start", "end"))
    assert start["3"].shape == end["3"].shape == (16, 16)
    assert not np.array_equal(start["3"], end["3"])
    last = load_arrays(base.dynamics / "sparsify-0002.npz")
    assert sorted(last["out_perm"][:16].tolist()) == list(range(16))
    assert any(base.tensorboard.iterdir())
    assert summary.name in base.summary_text_path.read_text()


def test_a_finished_run_is_read_and_not_trained_again(
    base: RunFolder, small_recipe: Recipes, summary: RunSummary
) -> None:
    before = {path: path.stat().st_mtime_ns for path in base.path.rglob("*") if path.name != ".lock"}
    listener = Listener()
    assert run_pipeline(small_recipe(), base.path, observers=[listener]) == summary
    assert listener.stages == []
    assert before == {path: path.stat().st_mtime_ns for path in base.path.rglob("*") if path.name != ".lock"}


def test_another_recipe_is_refused_in_the_same_folder(base: RunFolder, small_recipe: Recipes) -> None:
    with pytest.raises(
        ValueError, match=r"another recipe:\n  stage2\.epochs: 2 there, 5 now\ngive the recipe of that run"
    ):
        run_pipeline(small_recipe("stage2.epochs=5"), base.path)
    assert len(base.metrics()) == 5


def test_observers_are_told_what_the_metrics_hold(base: RunFolder, small_recipe: Recipes, tmp_path: Path) -> None:
    listener = Listener()
    run_pipeline(small_recipe(), tmp_path / "run", observers=[listener])
    assert listener.stages == ["sparsify", "finetune"]
    assert listener.rows == RunFolder(tmp_path / "run").metrics()


def test_another_seed_gives_other_weights(base: RunFolder, small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe("seed=4"), tmp_path / "run")
    models = [ss.load(folder.model_path, network()) for folder in (base, RunFolder(tmp_path / "run"))]
    assert not torch.equal(models[0].get_parameter("0.weight"), models[1].get_parameter("0.weight"))


def test_a_first_stage_that_another_run_has_finished_is_not_repeated(
    base: RunFolder, small_recipe: Recipes, tmp_path: Path, summary: RunSummary
) -> None:
    listener = Listener()
    again = run_pipeline(small_recipe(f"sparsify.from_run={base.path}"), tmp_path / "run", observers=[listener])
    assert listener.stages == ["finetune"]
    folder = RunFolder(tmp_path / "run")
    assert folder.plan_path.read_text() == base.plan_path.read_text()
    assert [row["stage"] for row in folder.metrics()] == ["compress", "finetune", "finetune"]
    assert again.compressed_top1 == summary.compressed_top1
    assert again.finetuned == summary.finetuned
    assert again.sparsified is None


@pytest.mark.parametrize(
    "override",
    [
        "seed=9",
        "sparsify.target=0.3",
        "sparsify.budget=macs",
        "sparsify.min_channels_per_group=64",
        "sparsify.importance=l2",
        "sparsify.exclude=('3',)",
        "stage1.epochs=3",
        "data.batch_size=32",
    ],
)
def test_another_first_stage_than_the_recipe_asks_for_is_refused(
    override: str, base: RunFolder, small_recipe: Recipes, tmp_path: Path
) -> None:
    given = override.replace("('3',)", "['3']")
    with pytest.raises(ValueError, match=f"another first stage than this recipe asks for, with {re.escape(override)};"):
        run_pipeline(small_recipe(f"sparsify.from_run={base.path}", given), tmp_path / "run")


def start_of_finetuning(path: Path) -> tuple[dict[str, torch.Tensor], ss.GroupingPlan]:
    """Weights and plan of a run whose second stage stood still and trained the masked form."""
    folder = RunFolder(path)
    saved, plan = folder.load_checkpoint(), folder.load_plan()
    assert saved is not None
    assert plan is not None
    return saved["model"], plan


def masked(weight: torch.Tensor, layer: ss.LayerPlan) -> torch.Tensor:
    return weight * kept_connections(layer)[:, :, None, None]


def test_finetuning_starts_from_the_sparsified_weights(base: RunFolder, small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe(f"sparsify.from_run={base.path}", *STANDSTILL), tmp_path / "run")
    state, plan = start_of_finetuning(tmp_path / "run")
    sparsified = load_named(base.checkpoints, "sparsified")
    assert sparsified is not None
    for name, layer in plan.layers.items():
        assert torch.equal(state[f"{name}.weight"], masked(sparsified["model"][f"{name}.weight"], layer))
    assert torch.equal(state["0.weight"], sparsified["model"]["0.weight"])


@pytest.mark.parametrize("ablation", ["from-scratch", "shufflenet", "random", "no-shuffle"])
def test_an_ablation_has_the_learned_levels_its_own_orders_and_fresh_weights(
    ablation: str, base: RunFolder, small_recipe: Recipes, tmp_path: Path
) -> None:
    options = (f"sparsify.from_run={base.path}", f"finetune.ablation={ablation}", *STANDSTILL)
    run_pipeline(small_recipe(*options), tmp_path / "run")
    state, plan = start_of_finetuning(tmp_path / "run")
    learned = base.load_plan()
    assert learned is not None
    torch.manual_seed(derived_seed(3, "fresh weights of the ablation"))
    fresh = network().state_dict()
    assert any(layer.group_level > 1 for layer in plan.layers.values())
    for name, layer in plan.layers.items():
        assert layer.group_level == learned.layers[name].group_level
        check_orders(ablation, layer, learned.layers[name])
        expected = masked(fresh[f"{name}.weight"] * layer.num_groups**0.5, layer)
        torch.testing.assert_close(state[f"{name}.weight"], expected)
    assert torch.equal(state["0.weight"], fresh["0.weight"])


def check_orders(ablation: str, layer: ss.LayerPlan, learned: ss.LayerPlan) -> None:
    natural = np.arange(16)
    if ablation == "from-scratch":
        assert layer == learned
    elif ablation == "no-shuffle":
        assert np.array_equal(layer.out_perm, natural)
        assert np.array_equal(layer.in_perm, natural)
    elif ablation == "shufflenet":
        interleaved = natural.reshape(layer.num_groups, -1).T.ravel()
        assert np.array_equal(inverse(layer.out_perm), interleaved)
        assert np.array_equal(layer.in_perm, natural)
    else:
        for order, other in ((layer.out_perm, learned.out_perm), (layer.in_perm, learned.in_perm)):
            assert sorted(order) == natural.tolist()
            assert not np.array_equal(order, natural)
            assert not np.array_equal(order, other)


def test_an_ablation_is_no_first_stage_for_other_runs(base: RunFolder, small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe("finetune.ablation=random", *STANDSTILL), tmp_path / "random")
    with pytest.raises(ValueError, match="is an ablation, whose orders were not learned; name the run whose were"):
        run_pipeline(small_recipe(f"sparsify.from_run={tmp_path / 'random'}"), tmp_path / "run")


def test_slimming_ends_in_narrow_tensors_that_are_saved_and_read_back(small_recipe: Recipes, tmp_path: Path) -> None:
    name = "cifar-resnet8"
    options = (f"model.name={name}", "kind=slimming", "slimming.target=0.5", "stage1.epochs=1", "stage2.epochs=1")
    summary = run_pipeline(small_recipe(*options), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    small, dense = load_slimmed(folder.model_path, network(name)), network(name)
    params = sum(parameter.numel() for parameter in small.parameters())
    assert summary.params.after == params <= 0.5 * summary.params.before
    narrower = [
        tuple(parameter.shape) != tuple(small.get_parameter(key).shape) for key, parameter in dense.named_parameters()
    ]
    assert any(narrower)
    assert [row["stage"] for row in folder.metrics()] == ["slim", "compress", "finetune"]
    assert 0 < folder.metrics()[1]["removed_channel_fraction"] < 1
    assert (summary.finetune_form, summary.min_kept_norm, summary.target) == (None, None, 0.5)
    assert summary.converted_top1 == summary.finetuned.last_top1
    selection = ChannelSelection.from_json((folder.path / "selection.json").read_text())
    assert selection.removed_mac_fraction == pytest.approx(summary.removed_mac_fraction)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["model.name=small_networks:plain"], "slimming knows the channels of"),
        (["model.name=small_networks:slimmable", "slimming.target=0.99"], "target"),
    ],
)
def test_what_cannot_be_slimmed_is_refused_before_it_is_trained(
    overrides: list[str], complaint: str, small_recipe: Recipes, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=complaint):
        run_pipeline(small_recipe("kind=slimming", *overrides), tmp_path / "run")
    assert RunFolder(tmp_path / "run").metrics() == []


def test_a_dense_run_is_the_second_stage_alone(small_recipe: Recipes, tmp_path: Path) -> None:
    listener = Listener()
    recipe = small_recipe("kind=dense", "stage2.epochs=3", "data.batch_size=64")
    summary = run_pipeline(recipe, tmp_path / "run", observers=[listener])
    folder = RunFolder(tmp_path / "run")
    assert listener.stages == ["train"]
    assert [row["epoch"] for row in folder.metrics()] == [1, 2, 3]
    assert summary.params.before == summary.params.after
    assert (summary.target, summary.sparsified, summary.compressed_top1) == (None, None, None)
    assert not folder.plan_path.exists()
    assert summary.finetuned.last_top1 > 0.3, "66 steps are enough to learn something"
    losses = [row["train_loss"] for row in folder.metrics()]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("remembered", [None, "masked"])
def test_on_a_cpu_finetuning_is_grouped_unless_the_folder_remembers_another_form(
    remembered: str | None, small_recipe: Recipes, tmp_path: Path
) -> None:
    recipe, folder = small_recipe("finetune.form=auto", "stage1.epochs=1", "stage2.epochs=1"), RunFolder(tmp_path)
    # Six steps and the end of the epoch.
    questions = itertools.count(1)
    with pytest.raises(RunInterrupted, match="after epoch 1 of sparsify"):
        run_pipeline(recipe, tmp_path, should_stop=lambda: next(questions) >= 7)
    if remembered is not None:
        folder.remember("finetune_form", remembered)
    assert run_pipeline(recipe, tmp_path).finetune_form == (remembered or "grouped")
    assert json.loads(folder.decisions_path.read_text()) == {"finetune_form": remembered or "grouped"}


def test_a_layer_that_takes_no_part_does_not_stop_a_run(small_recipe: Recipes, tmp_path: Path) -> None:
    options = ("model.name=small_networks:with_unused_layer", "stage1.epochs=1", "stage2.epochs=1")
    assert run_pipeline(small_recipe(*options), tmp_path / "run").removed_param_fraction >= 0.4


def test_excluded_layers_stay_dense(small_recipe: Recipes, tmp_path: Path) -> None:
    options = ('sparsify.exclude=["3"]', "sparsify.target=0.2", "stage1.epochs=1", "stage2.epochs=1")
    run_pipeline(small_recipe(*options), tmp_path / "run")
    plan = RunFolder(tmp_path / "run").load_plan()
    assert plan is not None
    assert list(plan.layers) == ["6"]


def test_a_budget_of_operations_is_met_in_operations(small_recipe: Recipes, tmp_path: Path) -> None:
    options = ("sparsify.budget=macs", "sparsify.target=0.6", "stage1.epochs=1", "stage2.epochs=1")
    assert run_pipeline(small_recipe(*options), tmp_path / "run").removed_mac_fraction >= 0.6


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["engine.precision=16"], "needs a GPU"),
        (["data.name=cifar10"], "needs a root"),
        (["model.name=small_networks:nothing"], "has no 'nothing'"),
        (["sparsify.target=0.99"], "target"),
        (["finetune.teacher=/nowhere"], "is not the folder of a finished run; train the teacher first"),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_trained(
    overrides: list[str], complaint: str, small_recipe: Recipes, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=complaint):
        run_pipeline(small_recipe(*overrides), tmp_path / "run")
    assert RunFolder(tmp_path / "run").metrics() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_that_names_the_key(small_recipe: Recipes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.device is cuda, but PyTorch sees no GPU here"):
        run_pipeline(small_recipe("engine.device=cuda"), tmp_path / "run")


def test_a_saved_network_that_is_not_the_trained_one_is_noticed(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(path: Path, model: nn.Module) -> nn.Module:
        loaded = ss.load(path, model)
        with torch.no_grad():
            list(loaded.parameters())[-2].neg_()
        return loaded

    monkeypatch.setattr("strucspars.train.procedures.load", spoilt)
    with pytest.raises(RuntimeError, match="is not the network that was trained"):
        run_pipeline(small_recipe(), tmp_path / "run")
    assert not RunFolder(tmp_path / "run").summary_json_path.exists()
    assert RunFolder(tmp_path / "run").load_checkpoint() is not None


@pytest.mark.parametrize(
    ("loss", "trained_loss", "is_same"),
    [
        (1.04, 1.0, True),
        (0.96, 1.0, True),
        (1.06, 1.0, False),
        (0.94, 1.0, False),
        (math.nan, 1.0, False),
        # Rounding is no smaller where there is hardly any loss left.
        (0.004, 0.0001, True),
        (0.006, 0.0001, False),
    ],
)
def test_only_rounding_may_lie_between_the_saved_network_and_the_trained_one(
    loss: float, trained_loss: float, is_same: bool, tmp_path: Path
) -> None:
    with nullcontext() if is_same else pytest.raises(RuntimeError, match="is not the network that was trained"):
        pipeline._check_deployed(tmp_path / "model.safetensors", loss, trained_loss)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_stored_importance_has_the_norm_of_the_recipe(norm: Norm, small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe(f"sparsify.importance={norm}", "stage1.epochs=1", "stage2.epochs=1"), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    torch.manual_seed(derived_seed(3, "weights"))
    sparsified = load_named(folder.checkpoints, "sparsified")
    assert sparsified is not None
    for moment, state in (("start", network().state_dict()), ("end", sparsified["model"])):
        stored = load_arrays(folder.importance / f"{moment}.npz")
        assert set(stored) == {"3", "6"}
        for name, matrix in stored.items():
            expected = importance_matrix(state[f"{name}.weight"], norm).astype(np.float16)
            np.testing.assert_array_equal(matrix, expected)


def test_only_included_layers_are_grouped(small_recipe: Recipes, tmp_path: Path) -> None:
    options = ("sparsify.include=['6']", "sparsify.target=0.2", "stage1.epochs=1", "stage2.epochs=1")
    run_pipeline(small_recipe(*options), tmp_path / "run")
    plan = RunFolder(tmp_path / "run").load_plan()
    assert plan is not None
    assert list(plan.layers) == ["6"]


def test_slimming_pulls_as_strongly_as_the_recipe_says(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(model: nn.Module, strength: float) -> None:
        raise ValueError(f"strength {strength}")

    monkeypatch.setattr(procedures, "SlimmingRule", noted)
    with pytest.raises(ValueError, match=r"strength 0\.0125"):
        run_pipeline(
            small_recipe("kind=slimming", "model.name=small_networks:slimmable", "slimming.strength=0.0125"),
            tmp_path / "run",
        )


def test_the_second_stage_sees_other_batches_than_the_first(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    epoch_of = ResidentBatches.epoch

    def noting(self: ResidentBatches, epoch: int, *, start_step: int = 0) -> Iterator[Batch]:
        if self.order.shuffled:
            seen.append(epoch)
        return epoch_of(self, epoch, start_step=start_step)

    monkeypatch.setattr(ResidentBatches, "epoch", noting)
    run_pipeline(small_recipe(), tmp_path / "run")
    assert seen == [1, 2, 3, 4]


def test_the_accuracy_before_compression_is_that_of_the_first_stages_end(base: RunFolder) -> None:
    rows = {(row["stage"], row["epoch"]): row for row in base.metrics()}
    for key in ("top1", "top5"):
        assert rows["compress", 0][f"before_{key}"] == rows["sparsify", 2][f"test_{key}"]
    assert rows["compress", 0]["before_top1"] < rows["compress", 0]["before_top5"]


def test_another_seed_gives_other_batches(small_recipe: Recipes) -> None:
    runs = [Run(small_recipe(f"seed={seed}"), RunFolder("never made")) for seed in (3, 3, 4)]
    first = [next(iter(run.train.epoch(1))) for run in runs]
    assert torch.equal(first[0].labels, first[1].labels)
    assert torch.equal(first[0].images, first[1].images)
    assert not torch.equal(first[0].labels, first[2].labels)


def test_the_row_of_the_compression_has_the_numbers_of_the_plan(base: RunFolder) -> None:
    (row,) = (row for row in base.metrics() if row["stage"] == "compress")
    plan = base.load_plan()
    assert plan is not None
    assert plan.removed_param_fraction != plan.removed_mac_fraction
    for key in ("min_kept_norm", "removed_param_fraction", "removed_mac_fraction"):
        assert row[key] == getattr(plan, key), key


def test_finetuning_starts_from_recalibrated_statistics_where_they_are_asked_for(
    base: RunFolder, small_recipe: Recipes, tmp_path: Path
) -> None:
    means = []
    for asked in ("true", "false"):
        options = (f"sparsify.from_run={base.path}", f"finetune.recalibrate_bn={asked}", *STANDSTILL)
        run_pipeline(small_recipe(*options), tmp_path / asked)
        means.append(start_of_finetuning(tmp_path / asked)[0]["4.running_mean"])
    # Both have seen the same batches since.
    assert not torch.allclose(means[0], means[1])
