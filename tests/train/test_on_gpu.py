"""What only a GPU can show: captured steps, and runs that share it. Skipped, visibly, where there is none."""

import copy
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from strucspars.data.catalogue import batches_of, load_data
from strucspars.models.catalogue import build_model
from strucspars.nn.layers import kept_connections
from strucspars.train.engine import Engine
from strucspars.train.epochs import CapturedEpochs, Evaluation, PlainEpochs, captured
from strucspars.train.outcome import RunSummary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import EngineRecipe, Recipe
from strucspars.train.run import RunInterrupted
from strucspars.train.run_folder import RunFolder
from strucspars.train.side_by_side import run_side_by_side

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

Recipes = Callable[..., Recipe]
GPU = ("engine.device=cuda", "data.batch_size=64")


@pytest.fixture(autouse=True)
def exact_arithmetic() -> Iterator[None]:
    """Full precision and the same kernels every time."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = False, True, False, False
    yield
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = before


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way epochs were run."""
    used: list[str] = []
    for kind in (CapturedEpochs, PlainEpochs):
        run: Any = kind.run

        def noted(self: Any, *arguments: Any, run: Any = run, kind: Any = kind, **options: Any) -> int:
            used.append(kind.__name__)
            done: int = run(self, *arguments, **options)
            return done

        monkeypatch.setattr(kind, "run", noted)
    return used


def assert_close_runs(one: Path, other: Path, *, rel: float = 1e-3, compressed_rel: float = 1e-3) -> None:
    """Equal losses, up to rounding; `compressed_rel` where a last digit may have decided about a channel's place."""
    rows = [RunFolder(path).metrics() for path in (one, other)]
    assert len(rows[0]) == len(rows[1])
    for left, right in zip(*rows, strict=True):
        assert (left["stage"], left["epoch"]) == (right["stage"], right["epoch"])
        tolerance = rel if left["stage"] in ("sparsify", "slim") else max(rel, compressed_rel)
        for key in ("train_loss", "test_loss"):
            if key in left:
                assert right[key] == pytest.approx(left[key], rel=tolerance), (left["stage"], left["epoch"], key)
    plans = [RunFolder(path).load_plan() for path in (one, other)]
    if plans[0] is not None and plans[1] is not None:
        levels = [{name: layer.group_level for name, layer in plan.layers.items()} for plan in plans if plan]
        assert levels[0] == levels[1]


@pytest.mark.parametrize(
    "options",
    [
        ("kind=dense",),
        ("kind=dense", "stage2.ema=0.9", "stage2.schedule=cosine", "stage2.label_smoothing=0.1"),
        ("kind=dense", "stage2.optimizer=adamw", "stage2.lr=0.003"),
        ("kind=dense", "engine.channels_last=true"),
        ("kind=dense", "data.batch_size=1347"),
        ("finetune.form=masked",),
        ("finetune.form=grouped", "stage1.ema=0.9"),
        ("kind=slimming", "model.name=cifar-resnet8"),
        ("sparsify.schedule=progressive", "stage2.epochs=4", "stage2.ema=0.9"),
    ],
)
def test_captured_epochs_equal_plain_ones(
    options: tuple[str, ...], small_recipe: Recipes, tmp_path: Path, runners: list[str]
) -> None:
    for allowed in ("true", "false"):
        runners.clear()
        run_pipeline(small_recipe(*GPU, *options, f"engine.cuda_graph={allowed}"), tmp_path / allowed)
        assert set(runners) == {"CapturedEpochs" if allowed == "true" else "PlainEpochs"}
    compressed_rel = 1e-3 if "kind=dense" in options else 0.05
    # AdamW divides by the size of a gradient, so the last digit of a small one decides about a whole step.
    rel = 1e-2 if "stage2.optimizer=adamw" in options else 1e-3
    assert_close_runs(tmp_path / "true", tmp_path / "false", rel=rel, compressed_rel=compressed_rel)


def test_captured_epochs_with_a_teacher_equal_plain_ones(small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe(*GPU, "kind=dense"), tmp_path / "teacher")
    taught = (f"finetune.teacher={tmp_path / 'teacher'}", "finetune.form=masked", "finetune.distill_weight=0.9")
    for allowed in ("true", "false"):
        run_pipeline(small_recipe(*GPU, *taught, f"engine.cuda_graph={allowed}"), tmp_path / allowed)
    assert_close_runs(tmp_path / "true", tmp_path / "false", compressed_rel=0.05)


@pytest.mark.parametrize("option", ["engine.cuda_graph=true", "engine.cuda_graph=false", "engine.precision=16"])
@pytest.mark.parametrize("questions", [7, 22 + 9, 2 * 23 + 5, 3 * 23 + 20])
def test_a_run_stopped_in_the_middle_of_an_epoch_goes_on_to_the_same_end(
    questions: int, option: str, small_recipe: Recipes, tmp_path: Path
) -> None:
    hard = ("model.name=small_networks:with_dropout", "stage1.ema=0.9", "stage2.ema=0.9")
    recipe = small_recipe(*GPU, *hard, option)
    asked = iter(range(10_000))
    with pytest.raises(RunInterrupted, match="stopped in epoch"):
        run_pipeline(recipe, tmp_path / "stopped", should_stop=lambda: next(asked) + 1 >= questions)
    for name in ("stopped", "whole"):
        run_pipeline(recipe, tmp_path / name)
    assert_close_runs(tmp_path / "whole", tmp_path / "stopped")
    states = [RunFolder(tmp_path / name).load_checkpoint() for name in ("whole", "stopped")]
    assert states[0] is not None
    assert states[1] is not None
    for key, value in states[0]["model"].items():
        torch.testing.assert_close(states[1]["model"][key], value, rtol=1e-2, atol=1e-3, msg=key)


def test_random_numbers_of_a_replay_are_new_and_follow_the_seed() -> None:
    mask = torch.zeros(1000, device="cuda")
    ones = torch.ones_like(mask)

    def draw() -> None:
        mask.copy_(functional.dropout(ones, 0.5))

    def drawn_again() -> torch.Tensor:
        graph.replay()
        return mask.cpu()

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # untyped in torch
        graph = captured(draw, lambda: [mask])
        assert (mask == 0).all(), "the warm-up is undone"
        torch.manual_seed(1)
        first, second = drawn_again(), drawn_again()
        state = torch.cuda.get_rng_state()
        third = drawn_again()
        torch.manual_seed(1)
        assert torch.equal(drawn_again(), first)
        torch.cuda.set_rng_state(state)
        assert torch.equal(drawn_again(), third)
    assert not torch.equal(first, second)


def test_pruned_weights_stay_exactly_zero_in_captured_steps(small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe(*GPU, "finetune.form=masked", "stage2.ema=0.9"), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    saved, plan = folder.load_checkpoint(), folder.load_plan()
    assert saved is not None
    assert plan is not None
    for name, layer in plan.layers.items():
        for state in (saved["model"], saved["average"]):
            weight, kept = state[f"{name}.weight"], kept_connections(layer)
            assert (weight[~kept] == 0).all()
            assert (weight[kept] != 0).any()


def test_a_captured_evaluation_equals_a_plain_one_and_follows_the_weights() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    model: nn.Module = build_model("small_networks:plain", num_classes=10).to(device)
    batches = batches_of(load_data("digits", None), training=False, batch_size=64, device=device)
    engines = [Engine(EngineRecipe(device="cuda", cuda_graph=allowed)) for allowed in (True, False)]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # untyped in torch
        replayed, plain = (Evaluation(engine, model, batches) for engine in engines)
        before = replayed.accuracy()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        after = replayed.accuracy()
        expected = plain.accuracy()
        again = replayed.accuracy()
    assert after == again
    assert before.loss != pytest.approx(after.loss, rel=1e-4)
    assert (after.top1, after.top5) == (expected.top1, expected.top5)
    assert after.loss == pytest.approx(expected.loss, rel=1e-5)


def test_capturing_an_evaluation_leaves_the_model_as_it_was() -> None:
    device = torch.device("cuda")
    model: nn.Module = build_model("small_networks:plain", num_classes=10).to(device)
    before = copy.deepcopy(model.state_dict())
    batches = batches_of(load_data("digits", None), training=False, batch_size=64, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # untyped in torch
        Evaluation(Engine(EngineRecipe(device="cuda")), model.train(), batches).accuracy()
    torch.cuda.synchronize()
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_runs_side_by_side_end_as_they_do_alone(small_recipe: Recipes, tmp_path: Path) -> None:
    recipes = {
        tmp_path / "masked": small_recipe(*GPU, "name=masked", "stage1.ema=0.8"),
        tmp_path / "grouped": small_recipe(*GPU, "name=grouped", "seed=5", "finetune.form=grouped"),
        tmp_path / "dense": small_recipe(*GPU, "name=dense", "seed=6", "kind=dense", "stage2.epochs=4"),
    }
    outcomes = run_side_by_side(recipes, jobs=3)
    assert all(isinstance(outcome, RunSummary) for outcome in outcomes.values()), outcomes
    for path, recipe in recipes.items():
        run_pipeline(recipe, tmp_path / f"{path.name}-alone")
        assert_close_runs(tmp_path / f"{path.name}-alone", path, compressed_rel=1e-3 if path.name == "dense" else 0.05)


def test_teachers_of_runs_side_by_side_spoil_no_capture(small_recipe: Recipes, tmp_path: Path) -> None:
    run_pipeline(small_recipe(*GPU, "kind=dense"), tmp_path / "teacher")
    taught = f"finetune.teacher={tmp_path / 'teacher'}"
    # Other batches, so that algorithms for every run have to be tried out.
    recipes = {
        tmp_path / str(size): small_recipe("engine.device=cuda", taught, "kind=dense", f"data.batch_size={size}")
        for size in range(60, 68)
    }
    outcomes = run_side_by_side(recipes, jobs=len(recipes))
    assert all(isinstance(outcome, RunSummary) for outcome in outcomes.values()), outcomes


def test_a_run_that_fails_side_by_side_does_not_stop_the_others(small_recipe: Recipes, tmp_path: Path) -> None:
    recipes = {
        tmp_path / "diverging": small_recipe(*GPU, "stage1.lr=1e18"),
        tmp_path / "good": small_recipe(*GPU),
    }
    outcomes = run_side_by_side(recipes, jobs=2)
    assert "lower learning rate" in str(outcomes[tmp_path / "diverging"])
    assert isinstance(outcomes[tmp_path / "good"], RunSummary)


@pytest.mark.parametrize("precision", ["bf16", "16"])
def test_half_precision_trains_nearly_as_full_precision(
    precision: str, small_recipe: Recipes, tmp_path: Path, runners: list[str]
) -> None:
    run_pipeline(small_recipe(*GPU, "kind=dense", f"engine.precision={precision}"), tmp_path / precision)
    # A gradient scaler decides on the host, so its steps cannot be captured.
    assert set(runners) == {"CapturedEpochs" if precision == "bf16" else "PlainEpochs"}
    run_pipeline(small_recipe(*GPU, "kind=dense"), tmp_path / "32")
    half, full = (RunFolder(tmp_path / name).metrics()[0]["train_loss"] for name in (precision, "32"))
    assert half != full
    assert half == pytest.approx(full, rel=0.05)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="torch.compile on a GPU needs triton")
# Inductor calls what torch itself deprecates; not seen without a GPU.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("precision", "rel"), [("32", 1e-2), ("bf16", 5e-2)])
def test_a_compiled_network_trains_as_the_plain_one(
    small_recipe: Recipes, tmp_path: Path, precision: str, rel: float
) -> None:
    losses = []
    for compiled in ("true", "false"):
        options = ("kind=dense", f"engine.compile={compiled}", f"engine.precision={precision}")
        run_pipeline(small_recipe(*GPU, *options), tmp_path / compiled)
        # Few images make the loss in evaluation mode chaotic: statistics of batch norms differ in their last digits.
        losses.append([row["train_loss"] for row in RunFolder(tmp_path / compiled).metrics()])
    assert losses[0] == pytest.approx(losses[1], rel=rel)


def test_finetuning_is_masked_on_the_gpu(small_recipe: Recipes, tmp_path: Path) -> None:
    assert run_pipeline(small_recipe(*GPU, "finetune.form=auto"), tmp_path / "run").finetune_form == "masked"
