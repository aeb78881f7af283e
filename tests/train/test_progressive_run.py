"""A progressive run: one stage, exact to resume, saved as it was evaluated, and shown in reports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.models.catalogue import build_model
from strucspars.nn.layers import kept_connections
from strucspars.report.contents import run_contents
from strucspars.report.reading import read_run
from strucspars.train.observer import RunObserver
from strucspars.train.outcome import read_summary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run import RunInterrupted
from strucspars.train.run_folder import RunFolder
from strucspars.train.side_by_side import run_side_by_side

STEPS = 6
QUESTIONS_PER_EPOCH = STEPS + 1
EPOCHS, DECISION, ANNEALED = 6, 2, 4
Recipes = Callable[..., Recipe]


def progressive(small_recipe: Recipes, *overrides: str) -> Recipe:
    schedule = ("schedule=progressive", f"decide_by={DECISION / EPOCHS}", f"anneal={(ANNEALED - DECISION) / EPOCHS}")
    options = (*(f"sparsify.{option}" for option in schedule), f"stage2.epochs={EPOCHS}", "stage2.lr=0.1")
    return small_recipe(*options, *overrides)


def hard(small_recipe: Recipes) -> Recipe:
    return progressive(small_recipe, "model.name=small_networks:with_dropout", "stage2.ema=0.8")


def network() -> nn.Module:
    return build_model("small_networks:plain", num_classes=10, image_shape=(3, 16, 16))


@pytest.fixture(scope="module")
def finished(small_recipe: Recipes, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("finished") / "run")
    run_pipeline(progressive(small_recipe), folder.path)
    return folder


@pytest.fixture(scope="module")
def whole(small_recipe: Recipes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is hard to repeat, and was not stopped."""
    path = tmp_path_factory.mktemp("whole") / "run"
    run_pipeline(hard(small_recipe), path)
    return path


def test_the_rows_of_its_one_stage_tell_how_far_it_is(finished: RunFolder) -> None:
    rows = finished.metrics()
    assert [(row["stage"], row["epoch"]) for row in rows] == [("train", epoch) for epoch in range(1, EPOCHS + 1)]
    annealed = [row["annealed"] for row in rows]
    assert annealed == [0, 0, pytest.approx(1 - 0.5**3), 1, 1, 1]
    assert rows[1]["lambda"] > 0
    assert [row["lambda"] for row in rows[DECISION:]] == [0] * (EPOCHS - DECISION)
    plan = finished.load_plan()
    assert plan is not None
    for row in rows[DECISION:]:
        assert row["removed_fraction"] == pytest.approx(plan.removed_param_fraction)
        assert row["min_kept_norm"] == plan.min_kept_norm
    # The accuracy is of what would be deployed; as long as that is another network, its own is there too.
    assert ["uncut_top1" in row for row in rows] == [True] * ANNEALED + [False] * (EPOCHS - ANNEALED)
    assert rows[ANNEALED - 1]["uncut_top1"] == rows[ANNEALED - 1]["test_top1"]


def test_what_is_saved_is_the_network_that_was_trained(finished: RunFolder) -> None:
    summary, plan, saved = read_summary(finished), finished.load_plan(), finished.load_checkpoint()
    assert summary is not None
    assert plan is not None
    assert saved is not None
    assert summary.converted_top1 == summary.finetuned.last_top1 == finished.metrics()[-1]["test_top1"]
    assert (summary.sparsified, summary.compressed_top1, summary.before_compression_top1) == (None, None, None)
    assert summary.removed_param_fraction == pytest.approx(plan.removed_param_fraction)
    assert summary.removed_param_fraction >= 0.4
    assert (summary.min_kept_norm, summary.finetune_form) == (plan.min_kept_norm, "masked")
    assert summary.removed_before_search == finished.metrics()[DECISION - 1]["removed_fraction"]
    for name, layer in plan.layers.items():
        assert saved["model"][f"{name}.weight"][~kept_connections(layer)].count_nonzero() == 0
    dense = network()
    dense.load_state_dict(saved["model"])
    images = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ss.load(finished.model_path, network()).eval()(images), dense.eval()(images))
    assert "trained, last epoch" in finished.summary_text_path.read_text()


@pytest.mark.parametrize(
    "stops",
    [
        [3],
        [QUESTIONS_PER_EPOCH * (DECISION - 1) + STEPS],
        [QUESTIONS_PER_EPOCH * DECISION],
        [QUESTIONS_PER_EPOCH * DECISION + 4, 3, 1],
        [QUESTIONS_PER_EPOCH * ANNEALED - 2, 2],
        [QUESTIONS_PER_EPOCH * ANNEALED, 3, 11],
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(
    stops: list[int],
    small_recipe: Recipes,
    whole: Path,
    tmp_path: Path,
    assert_same_outcome: Callable[..., None],
    stop_after: Callable[[int], Callable[[], bool]],
) -> None:
    recipe = hard(small_recipe)
    for questions in stops:
        with pytest.raises(RunInterrupted, match=r"stopped (in|after) epoch [1-6] of train"):
            run_pipeline(recipe, tmp_path / "run", should_stop=stop_after(questions))
    run_pipeline(recipe, tmp_path / "run")
    assert_same_outcome(whole, tmp_path / "run")


def test_an_average_of_the_weights_is_evaluated_and_saved_without_what_was_removed(whole: Path) -> None:
    folder = RunFolder(whole)
    plan, saved = folder.load_plan(), folder.load_checkpoint()
    assert plan is not None
    assert saved is not None
    for name, layer in plan.layers.items():
        assert saved["average"][f"{name}.weight"][~kept_connections(layer)].count_nonzero() == 0
    summary = read_summary(folder)
    assert summary is not None
    assert summary.converted_top1 == folder.metrics()[-1]["test_top1"]


class _Stops(RunObserver):
    """Remembers the metrics of every epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def epoch_done(self, run: str, row: Any) -> None:
        self.rows.append(dict(row))


@pytest.mark.parametrize(("optimizer", "teacher"), [("sgd", "dense"), ("adamw", "weights")])
def test_trained_weights_may_be_decided_about_at_once_and_taught_by_the_dense_network(
    optimizer: str, teacher: str, small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_pipeline(small_recipe("kind=dense", "stage2.epochs=3"), tmp_path / "dense")
    weights, observer = tmp_path / "dense" / "model.safetensors", _Stops()
    trained = torch.nn.Module.state_dict(ss.load(weights, network()))
    torch.save(trained, tmp_path / "trained.pth")
    options = (
        "sparsify.decide_by=0",
        f"stage2.optimizer={optimizer}",
        "stage2.lr=0.01",
        f"model.weights={tmp_path / 'trained.pth'}",
        f"finetune.teacher={teacher}",
    )
    run_pipeline(progressive(small_recipe, *options), tmp_path / "run", observers=[observer])
    assert [row["annealed"] for row in observer.rows] == [pytest.approx(1 - 0.5**3), 1, 1, 1, 1, 1]
    summary = read_summary(RunFolder(tmp_path / "run"))
    assert summary is not None
    assert summary.removed_before_search is None
    assert summary.min_kept_norm is not None


def test_calibration_images_decide_about_trained_weights(
    small_recipe: Recipes, tmp_path: Path, assert_same_outcome: Callable[..., None], stop_after: Any
) -> None:
    run_pipeline(small_recipe("kind=dense", "stage2.epochs=3"), tmp_path / "dense")
    weights = tmp_path / "dense" / "model.safetensors"
    options = ("sparsify.decide_by=0", "sparsify.calibration=128", f"model.weights={weights}")
    recipe = progressive(small_recipe, *options)
    run_pipeline(recipe, tmp_path / "run")
    plan = RunFolder(tmp_path / "run").load_plan()
    assert plan is not None
    assert plan.predicted_divergence is not None
    with pytest.raises(RunInterrupted):
        run_pipeline(recipe, tmp_path / "stopped", should_stop=stop_after(QUESTIONS_PER_EPOCH + 3))
    run_pipeline(recipe, tmp_path / "stopped")
    assert_same_outcome(tmp_path / "run", tmp_path / "stopped")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("sparsify.from_run=elsewhere", "sparsify.from_run: a progressive schedule has one stage"),
        ("finetune.ablation=random", "finetune.ablation: a progressive schedule has one stage"),
        ("finetune.form=grouped", "finetune.form: a progressive schedule has one stage"),
        ("finetune.recalibrate_bn=true", "finetune.recalibrate_bn: a progressive schedule has one stage"),
        ("sparsify.decide_by=0", "decides from the weights that the run starts with, but they are fresh"),
        ("stage2.optimizer=adamw", "stage2.optimizer 'adamw' does not follow the strength of the penalty"),
        ("sparsify.anneal=0.9", "more than the whole training"),
    ],
)
def test_what_needs_two_stages_or_trained_weights_is_refused(
    override: str, complaint: str, small_recipe: Recipes
) -> None:
    with pytest.raises(ValueError, match=complaint):
        progressive(small_recipe, override)


def test_a_network_that_is_compressed_already_is_refused(
    finished: RunFolder, small_recipe: Recipes, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="is compressed already, with nothing to decide"):
        run_pipeline(progressive(small_recipe, f"model.weights={finished.model_path}"), tmp_path / "run")


def test_a_target_out_of_reach_is_refused_before_anything_is_written(small_recipe: Recipes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target 0\.99 cannot be reached"):
        run_pipeline(progressive(small_recipe, "sparsify.target=0.99"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_first_stages_options_do_not_make_another_run(finished: RunFolder, small_recipe: Recipes) -> None:
    run_pipeline(progressive(small_recipe, "stage1.epochs=7"), finished.path)
    with pytest.raises(ValueError, match="another recipe"):
        run_pipeline(progressive(small_recipe, "sparsify.schedule=two-stage"), finished.path)


def test_it_is_no_first_stage_for_other_runs(finished: RunFolder, small_recipe: Recipes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run that has finished its first stage"):
        run_pipeline(small_recipe(f"sparsify.from_run={finished.path}"), tmp_path / "run")


def test_runs_side_by_side_come_to_the_same_as_alone(
    finished: RunFolder, small_recipe: Recipes, tmp_path: Path, assert_same_outcome: Callable[..., None]
) -> None:
    recipes = {tmp_path / "one": progressive(small_recipe), tmp_path / "two": progressive(small_recipe, "seed=4")}
    outcomes = run_side_by_side(recipes, jobs=2)
    assert not [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
    assert_same_outcome(finished.path, tmp_path / "one", shared_generator=True)


def test_a_report_shows_a_run_before_and_after_its_end(
    finished: RunFolder, small_recipe: Recipes, tmp_path: Path, stop_after: Callable[[int], Callable[[], bool]]
) -> None:
    path = tmp_path / "run"
    with pytest.raises(RunInterrupted):
        run_pipeline(progressive(small_recipe), path, should_stop=stop_after(QUESTIONS_PER_EPOCH))
    for run, is_annealed in ((read_run(path), False), (read_run(finished.path), True)):
        contents = run_contents(run)
        figures = {figure.name: figure for figure in contents.figures}
        assert {"dynamics", "cardinality", "churn"} <= set(figures)
        assert "Annealed: the share" in figures["dynamics"].caption
        assert ("is zero from epoch 4 on" in figures["dynamics"].alt) == is_annealed
        assert len(contents.layers) == 2
        labels = {headline.label for headline in contents.headlines}
        assert ("top-1 trained" if is_annealed else "top-1 trained so far") in labels
        assert "top-1 before compression" not in labels


def test_the_summary_of_a_run_is_one_like_any_other(finished: RunFolder) -> None:
    document = json.loads(finished.summary_json_path.read_text())
    assert list(document["seconds"]) == ["train"]
    assert document["kind"] == "strucspars"
