"""Each option does what it says: checked against one step or one epoch computed by hand."""

import functools
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.convert.compress import recalibrate_
from strucspars.data.batches import Batch
from strucspars.data.catalogue import batches_of, load_data
from strucspars.models.catalogue import build_model
from strucspars.train.checkpoint import load_named
from strucspars.train.engine import Engine
from strucspars.train.epochs import Evaluation
from strucspars.train.outcome import RunSummary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import EngineRecipe, Recipe, StageRecipe
from strucspars.train.rules import HeldZerosRule, TrainingRule
from strucspars.train.run import derived_seed
from strucspars.train.run_folder import RunFolder
from strucspars.train.steps import StageLoss, TrainingStep, learning_rates

Recipes = Callable[..., Recipe]
SEED = 3
CPU = torch.device("cpu")
# All training images in one step.
ONE_STEP = ("kind=dense", "data.batch_size=1347", "stage2.epochs=1", "stage2.lr=0.1")


def network() -> nn.Module:
    return build_model("small_networks:plain", num_classes=10, image_shape=(3, 16, 16))


def fresh_network() -> nn.Module:
    """With the weights that a run starts from."""
    torch.manual_seed(derived_seed(SEED, "weights"))
    return network()


def only_batch() -> Batch:
    data = load_data("digits", None)
    return next(batches_of(data, training=True, batch_size=1347, device=CPU, seed=SEED).epoch(1))


class OneStep:
    """A dense run of one step, and what it left."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self.summary: RunSummary = run_pipeline(recipe, path)
        self.folder = RunFolder(path)
        self.row = self.folder.metrics()[-1]
        self.model = ss.load(self.folder.model_path, network())

    @property
    def weight(self) -> torch.Tensor:
        return self.model.get_parameter("3.weight").detach()


@pytest.fixture(scope="module")
def plain(small_recipe: Recipes, tmp_path_factory: pytest.TempPathFactory) -> OneStep:
    return OneStep(small_recipe(*ONE_STEP), tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture
def one_step(small_recipe: Recipes, tmp_path: Path) -> Callable[..., OneStep]:
    def run(*overrides: str) -> OneStep:
        return OneStep(small_recipe(*ONE_STEP, *overrides), tmp_path / "run")

    return run


def test_without_options_a_step_is_plain_sgd(plain: OneStep) -> None:
    model, batch = fresh_network(), only_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scores = model(batch.images)
    loss = functional.cross_entropy(scores, batch.labels)
    torch.autograd.backward(loss)
    optimizer.step()
    torch.testing.assert_close(dict(plain.model.state_dict()), dict(model.state_dict()), rtol=1e-4, atol=1e-6)
    assert plain.row["train_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert plain.row["train_top1"] == (scores.argmax(dim=1) == batch.labels).double().mean().item()


def test_an_adamw_step_is_pytorch_s(one_step: Callable[..., OneStep]) -> None:
    taken = one_step("stage2.optimizer=adamw", "stage2.lr=0.002", "stage2.weight_decay=0.05")
    model, batch = fresh_network(), only_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.05)
    torch.autograd.backward(functional.cross_entropy(model(batch.images), batch.labels))
    optimizer.step()
    torch.testing.assert_close(dict(taken.model.state_dict()), dict(model.state_dict()), rtol=1e-4, atol=1e-6)


def test_label_smoothing_is_in_the_training_loss(one_step: Callable[..., OneStep]) -> None:
    batch = only_batch()
    loss = functional.cross_entropy(fresh_network()(batch.images), batch.labels, label_smoothing=0.3)
    assert one_step("stage2.label_smoothing=0.3").row["train_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_the_average_of_the_weights_is_evaluated_and_kept(plain: OneStep, one_step: Callable[..., OneStep]) -> None:
    averaged = one_step("stage2.ema=0.75")
    before = fresh_network().get_parameter("3.weight").detach()
    torch.testing.assert_close(averaged.weight, 0.75 * before + 0.25 * plain.weight)
    test = batches_of(load_data("digits", None), training=False, batch_size=450, device=CPU)
    accuracy = Evaluation(Engine(EngineRecipe(device="cpu")), averaged.model, test).accuracy()
    assert averaged.row["test_loss"] == pytest.approx(accuracy.loss, rel=1e-5)
    assert averaged.row["test_loss"] != pytest.approx(plain.row["test_loss"], rel=1e-5)


def test_the_distance_from_the_teacher_is_in_the_training_loss(
    plain: OneStep, one_step: Callable[..., OneStep]
) -> None:
    written = plain.folder.model_path.read_bytes()
    options = ("finetune.distill_weight=0.7", "finetune.distill_temperature=2")
    student = one_step(f"finetune.teacher={plain.folder.path}", *options)
    batch, teacher = only_batch(), plain.model.eval()
    with torch.no_grad():
        scores = fresh_network()(batch.images)
        target = functional.softmax(teacher(batch.images) / 2, dim=1)
    distance = (target * (target.log() - functional.log_softmax(scores / 2, dim=1))).sum(dim=1).mean()
    expected = 0.3 * functional.cross_entropy(scores, batch.labels) + 0.7 * 4 * distance
    assert student.row["train_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert plain.folder.model_path.read_bytes() == written


def test_a_student_learns_from_its_dense_teacher_through_both_stages(
    plain: OneStep, small_recipe: Recipes, tmp_path: Path
) -> None:
    options = (f"finetune.teacher={plain.folder.path}", "finetune.distill_weight=1", "finetune.form=grouped")
    run_pipeline(small_recipe(*options), tmp_path / "run")
    rows = RunFolder(tmp_path / "run").metrics()
    # The teacher has learned next to nothing, and is easy to copy: the labels are far off, the teacher is near.
    assert rows[0]["train_loss"] > 2
    assert rows[-1]["train_loss"] < 0.5


def test_a_run_starts_from_the_weights_that_it_is_given(plain: OneStep, small_recipe: Recipes, tmp_path: Path) -> None:
    torch.save({"state_dict": plain.model.state_dict()}, tmp_path / "weights.pt")
    shutil.copy(plain.folder.model_path, tmp_path / "weights.safetensors")
    for name in ("weights.pt", "weights.safetensors"):
        recipe = small_recipe(*ONE_STEP, "stage2.lr=1e-30", f"model.weights={tmp_path / name}")
        assert torch.equal(OneStep(recipe, tmp_path / f"run-{name}").weight, plain.weight)
        sparsified = small_recipe(
            "stage1.lr=1e-30", "stage1.epochs=1", "stage2.epochs=1", f"model.weights={tmp_path / name}"
        )
        run_pipeline(sparsified, tmp_path / f"sparsified-{name}")
        saved = load_named(tmp_path / f"sparsified-{name}" / "checkpoints", "sparsified")
        assert saved is not None
        assert torch.equal(saved["model"]["3.weight"], plain.weight)


def test_bf16_computes_coarsely_and_keeps_weights_whole(plain: OneStep, one_step: Callable[..., OneStep]) -> None:
    coarse = one_step("engine.precision=bf16")
    assert coarse.weight.dtype == torch.float32
    assert coarse.row["train_loss"] != plain.row["train_loss"]
    assert coarse.row["train_loss"] == pytest.approx(plain.row["train_loss"], rel=0.02)
    torch.testing.assert_close(coarse.weight, plain.weight, rtol=0.05, atol=0.01)


def test_channels_last_is_the_layout_of_images_and_weights_and_changes_no_result(
    plain: OneStep, one_step: Callable[..., OneStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = []
    forward = nn.Conv2d.forward

    def watched(self: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
        if self.training and images.shape[0] > 1 and self.in_channels > 3:
            layouts.append([part.is_contiguous(memory_format=torch.channels_last) for part in (images, self.weight)])
        return forward(self, images)

    monkeypatch.setattr(nn.Conv2d, "forward", watched)
    outcome = one_step("engine.channels_last=true")
    assert layouts == [[True, True]] * 2
    torch.testing.assert_close(dict(outcome.model.state_dict()), dict(plain.model.state_dict()), rtol=1e-3, atol=1e-5)


def test_a_compiled_network_trains_as_the_plain_one(
    plain: OneStep, one_step: Callable[..., OneStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the last step, which writes C++ and takes half a minute; a GPU test has it.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    counters: Any = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    compiled = one_step("engine.compile=true")
    assert counters["stats"]["unique_graphs"] > 0
    torch.testing.assert_close(dict(compiled.model.state_dict()), dict(plain.model.state_dict()), rtol=1e-3, atol=1e-5)


def test_the_cosine_ends_near_zero_and_the_rates_are_noted(small_recipe: Recipes, tmp_path: Path) -> None:
    recipe = small_recipe("kind=dense", "stage2.schedule=cosine", "stage2.epochs=4", "stage2.lr_warmup=0.25")
    run_pipeline(recipe, tmp_path / "run")
    noted = [row["lr"] for row in RunFolder(tmp_path / "run").metrics()]
    assert noted == [learning_rates(recipe.stage2, epoch, 6)[-1] for epoch in (1, 2, 3, 4)]
    assert noted[0] == 0.05
    assert noted[-1] < 0.05 * 0.01


def test_recalibrated_statistics_are_used_for_the_accuracy_that_is_noted(small_recipe: Recipes, tmp_path: Path) -> None:
    recipe = small_recipe("finetune.recalibrate_bn=true", "stage2.epochs=1", "data.batch_size=128")
    summary = run_pipeline(recipe, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    saved, plan = load_named(folder.checkpoints, "sparsified"), folder.load_plan()
    assert saved is not None
    assert plan is not None
    model = network()
    model.load_state_dict(saved["model"])
    HeldZerosRule(model, plan)
    engine, data = Engine(EngineRecipe(device="cpu")), load_data("digits", None)
    test = batches_of(data, training=False, batch_size=128, device=CPU)
    assert summary.compressed_top1 == Evaluation(engine, model, test).accuracy().top1
    batches = batches_of(data, training=True, batch_size=128, device=CPU, seed=SEED)
    recalibrate_(model, (batch.images for batch in batches.epoch(1)))
    assert summary.recalibrated_top1 == Evaluation(engine, model, test).accuracy().top1
    assert summary.recalibrated_top1 > summary.compressed_top1


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_momentum_of_the_steps_is_that_of_the_recipe(momentum: float) -> None:
    model, reference = (nn.Sequential(nn.Flatten(), nn.Linear(12, 3)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    options = StageRecipe(epochs=1, lr=0.1, momentum=momentum, weight_decay=0.01)
    step = TrainingStep(Engine(EngineRecipe(device="cpu")), model, options, StageLoss(), TrainingRule())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)
    for seed in range(3):
        images = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
        labels = torch.tensor([0, 1, 2, 1])
        step(images, labels, None)
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(reference(images), labels))
        optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))


def first_stage(recipe: Recipe, path: Path) -> tuple[dict[str, Any], torch.Tensor]:
    """The row of a first stage of one step, and what it made of a weight."""
    run_pipeline(recipe, path)
    folder = RunFolder(path)
    sparsified = load_named(folder.checkpoints, "sparsified")
    assert sparsified is not None
    return folder.metrics()[0], sparsified["model"]["3.weight"]


def test_the_first_stage_has_its_own_label_smoothing_and_average(small_recipe: Recipes, tmp_path: Path) -> None:
    one_step = ("data.batch_size=1347", "stage1.epochs=1", "stage2.epochs=1")
    plain_row, weight = first_stage(small_recipe(*one_step), tmp_path / "plain")
    smooth_row, _ = first_stage(small_recipe(*one_step, "stage1.label_smoothing=0.3"), tmp_path / "smooth")
    _, averaged = first_stage(small_recipe(*one_step, "stage1.ema=0.75"), tmp_path / "averaged")
    batch, fresh = only_batch(), fresh_network()
    for row, smoothing in ((plain_row, 0.0), (smooth_row, 0.3)):
        loss = functional.cross_entropy(fresh(batch.images), batch.labels, label_smoothing=smoothing)
        assert row["train_loss"] == pytest.approx(loss.item(), rel=1e-5)
    before = fresh.get_parameter("3.weight").detach()
    torch.testing.assert_close(averaged, 0.75 * before + 0.25 * weight)
