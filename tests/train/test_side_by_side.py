import itertools
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from strucspars.train.engine import Engine
from strucspars.train.observer import RunObserver
from strucspars.train.outcome import RunSummary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import EngineRecipe, Recipe
from strucspars.train.run import RunInterrupted, TrainingDiverged
from strucspars.train.side_by_side import run_side_by_side

Recipes = Callable[..., Recipe]
Comparison = Callable[..., None]


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_side_by_side_end_as_they_do_alone(
    jobs: int, small_recipe: Recipes, tmp_path: Path, assert_same_outcome: Comparison
) -> None:
    recipes = {
        tmp_path / "masked": small_recipe("name=masked", "stage1.ema=0.8"),
        tmp_path / "grouped": small_recipe("name=grouped", "seed=5", "finetune.form=grouped"),
    }
    summaries = run_side_by_side(recipes, jobs=jobs)
    for path, recipe in recipes.items():
        alone = run_pipeline(recipe, tmp_path / f"{path.name}-alone")
        summary = summaries[path]
        assert isinstance(summary, RunSummary)
        assert summary.finetuned == alone.finetuned
        assert_same_outcome(path, tmp_path / f"{path.name}-alone", shared_generator=True)


def test_weights_are_drawn_undisturbed_by_runs_that_begin_their_epochs(
    small_recipe: Recipes, tmp_path: Path, assert_same_outcome: Comparison
) -> None:
    slow = small_recipe("model.name=small_networks:slowly_built", "kind=dense", "stage2.epochs=1")
    run_pipeline(slow, tmp_path / "alone")
    busy = {tmp_path / f"busy-{seed}": small_recipe(f"seed={seed}", "stage1.epochs=6") for seed in range(2)}
    outcomes = run_side_by_side({**busy, tmp_path / "slow": slow}, jobs=3)
    assert all(isinstance(outcome, RunSummary) for outcome in outcomes.values()), outcomes
    assert_same_outcome(tmp_path / "alone", tmp_path / "slow", shared_generator=True)


def test_backward_passes_in_mixed_precision_do_not_disturb_each_other() -> None:
    def scores(engine: Engine) -> torch.Tensor:
        computed: torch.Tensor = engine.trainable(nn.Linear(2, 2))(torch.ones(1, 2))
        return computed

    one, other = (Engine(EngineRecipe(device="cpu", precision="bf16")) for _ in range(2))
    finished = threading.Event()

    def backward_elsewhere() -> None:
        other.backward(scores(other).sum())
        finished.set()

    thread = threading.Thread(target=backward_elsewhere)

    def let_the_other_try(gradient: torch.Tensor) -> None:
        thread.start()
        finished.wait(1)

    delayed = scores(one) * 1
    delayed.register_hook(let_the_other_try)  # type: ignore[no-untyped-call]  # untyped in torch
    one.backward(delayed.sum())
    thread.join()
    assert finished.is_set()


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_get_what_they_share_and_no_more_than_asked_for_go_on_at_once(
    jobs: int, small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []
    heard: list[str] = []
    threads: set[threading.Thread] = set()
    active, most = 0, 0
    lock = threading.Lock()

    class Listener(RunObserver):
        def run_started(self, run: str) -> None:
            heard.append(run)

    def noted(recipe: Recipe, path: Path, *, observers: Sequence[RunObserver], **options: object) -> None:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        given.append(options)
        for observer in observers:
            observer.run_started(path.name)
        threads.add(threading.current_thread())
        time.sleep(0.05)
        with lock:
            active -= 1
        raise RunInterrupted("noted")

    executor = ThreadPoolExecutor(1)

    def should_stop() -> bool:
        return False

    monkeypatch.setattr("strucspars.train.side_by_side.run_pipeline", noted)
    recipes = {tmp_path / str(number): small_recipe() for number in range(4)}
    outcomes = run_side_by_side(recipes, jobs=jobs, observers=[Listener()], should_stop=should_stop, executor=executor)
    assert [str(outcome) for outcome in outcomes.values()] == ["noted"] * 4
    assert given == [{"should_stop": should_stop, "executor": executor}] * 4
    assert sorted(heard) == ["0", "1", "2", "3"]
    assert most <= jobs
    # One at a time in the main thread, which some libraries insist on.
    assert (threads == {threading.main_thread()}) == (jobs == 1)


def test_a_run_that_fails_does_not_stop_the_others(small_recipe: Recipes, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    recipes = {
        tmp_path / "diverging": small_recipe("stage1.lr=1e18"),
        tmp_path / "foreign": small_recipe(),
        tmp_path / "good": small_recipe(),
    }
    outcomes = run_side_by_side(recipes, jobs=2)
    assert list(outcomes) == list(recipes)
    assert isinstance(outcomes[tmp_path / "diverging"], TrainingDiverged)
    assert "not a run folder" in str(outcomes[tmp_path / "foreign"])
    assert isinstance(outcomes[tmp_path / "good"], RunSummary)


def test_after_a_stop_nothing_new_is_begun(small_recipe: Recipes, tmp_path: Path) -> None:
    asked = iter(range(1000))
    recipes = {tmp_path / name: small_recipe() for name in ("first", "second")}
    outcomes = run_side_by_side(recipes, jobs=1, should_stop=lambda: next(asked) >= 3)
    assert all(isinstance(outcome, RunInterrupted) for outcome in outcomes.values())
    assert str(outcomes[tmp_path / "second"]) == "not begun"
    assert (tmp_path / "first" / "checkpoints" / "last.pt").exists()
    assert not (tmp_path / "second").exists()


def test_a_signal_that_another_thread_receives_is_heard(small_recipe: Recipes, tmp_path: Path) -> None:
    heard, asked = threading.Event(), itertools.count()

    def should_stop() -> bool:
        # Well after the main thread has begun to wait, to the thread of a run: that waiting is not interrupted by it.
        if next(asked) == 20:
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        return heard.is_set()

    former = signal.signal(signal.SIGUSR1, lambda number, frame: heard.set())
    try:
        recipes = {tmp_path / name: small_recipe("stage1.epochs=100") for name in ("first", "second")}
        outcomes = run_side_by_side(recipes, jobs=2, should_stop=should_stop)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert all(isinstance(outcome, RunInterrupted) for outcome in outcomes.values()), outcomes


def test_one_of_several_processes_does_not_go_on_to_another_run(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []

    def failing(recipe: Recipe, path: Path, **options: object) -> None:
        begun.append(path)
        raise ValueError("only here")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("strucspars.train.side_by_side.run_pipeline", failing)
    with pytest.raises(ValueError, match="only here"):
        run_side_by_side({tmp_path / "first": small_recipe(), tmp_path / "second": small_recipe()}, jobs=1)
    assert begun == [tmp_path / "first"]


@pytest.mark.parametrize("error", [RunInterrupted("stopped"), TrainingDiverged("the loss became nan")])
def test_what_several_processes_have_decided_together_is_an_outcome(
    error: Exception, small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(recipe: Recipe, path: Path, **options: object) -> None:
        raise error

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("strucspars.train.side_by_side.run_pipeline", failing)
    recipes = {tmp_path / "first": small_recipe(), tmp_path / "second": small_recipe()}
    assert run_side_by_side(recipes, jobs=1) == dict.fromkeys(recipes, error)


def test_processes_that_do_not_know_each_other_yet_begin_the_first_run_all_the_same(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []

    def stopped(recipe: Recipe, path: Path, **options: object) -> None:
        begun.append(path)
        raise RunInterrupted("stopped together")

    # One that stayed away would let the others wait for it.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("strucspars.train.side_by_side.run_pipeline", stopped)
    (outcome,) = run_side_by_side({tmp_path / "run": small_recipe()}, jobs=1, should_stop=lambda: True).values()
    assert begun == [tmp_path / "run"]
    assert str(outcome) == "stopped together"


def test_processes_begin_no_run_that_another_of_them_has_been_asked_to_stop_before(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(answers: list[bool], own: bool) -> None:
        answers[:] = [own, True]

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    (outcome,) = run_side_by_side({tmp_path / "run": small_recipe()}, jobs=1).values()
    assert str(outcome) == "not begun"
    assert not (tmp_path / "run").exists()
