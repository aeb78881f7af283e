"""Runs that build on each other, several at a time: each begins when what it builds on is there."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from strucspars.train.observer import RunObserver
from strucspars.train.outcome import RunSummary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import FINETUNE, Recipe
from strucspars.train.run import RunInterrupted, TrainingDiverged
from strucspars.train.run_folder import RunFolder
from strucspars.train.side_by_side import BaseRunFailed, run_side_by_side

Recipes = Callable[..., Recipe]
Comparison = Callable[..., None]
Stops = Callable[[int], Callable[[], bool]]

SHORT = ("stage1.epochs=1", "stage2.epochs=1")
# Of a wait that ends at once unless the test fails.
PATIENCE_SECONDS = 60


class Diary(RunObserver):
    """Notes what happens, and keeps the finetuning of one run from its end until another run has begun."""

    def __init__(self, *, held: str = "", until: str = "") -> None:
        self.entries: list[str] = []
        self._held, self._until, self._begun = held, until, threading.Event()

    def run_started(self, run: str) -> None:
        self.entries.append(f"{run} begins")
        if run == self._until:
            self._begun.set()

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        self.entries.append(f"{run}: {stage}")
        if (run, stage) == (self._held, FINETUNE):
            assert self._begun.wait(PATIENCE_SECONDS), f"{self._until} waits for the end of {run}"

    def run_ended(self, run: str, words: str) -> None:
        self.entries.append(f"{run} ends")

    def has_in_order(self, *entries: str) -> bool:
        """Whether all of these were noted, one after the other."""
        places = [self.entries.index(entry) for entry in entries]
        return places == sorted(places)


@pytest.fixture
def family(small_recipe: Recipes, tmp_path: Path) -> dict[str, Recipe]:
    """A dense run, one with two stages, and one that takes over the first stage of that and learns from the dense."""
    return {
        "teacher": small_recipe(*SHORT, "name=teacher", "kind=dense"),
        "base": small_recipe(*SHORT, "name=base"),
        "distilled": small_recipe(
            *SHORT,
            "name=distilled",
            f"sparsify.from_run={tmp_path / 'base'}",
            f"finetune.teacher={tmp_path / 'teacher'}",
        ),
    }


@pytest.fixture
def base(small_recipe: Recipes) -> Recipe:
    return small_recipe(*SHORT, "name=base")


@pytest.fixture
def dependent(small_recipe: Recipes, tmp_path: Path) -> Recipe:
    """A run that takes over the first stage of `base`."""
    return small_recipe(*SHORT, "name=dependent", f"sparsify.from_run={tmp_path / 'base'}")


def at(place: Path, recipes: dict[str, Recipe]) -> dict[Path, Recipe]:
    return {place / name: recipe for name, recipe in recipes.items()}


def test_a_run_begins_with_the_end_of_the_first_stage_and_of_the_teacher_that_it_builds_on(
    family: dict[str, Recipe], tmp_path: Path
) -> None:
    diary = Diary(held="base", until="distilled")
    outcomes = run_side_by_side(at(tmp_path, family), jobs=2, observers=[diary])
    assert all(isinstance(outcome, RunSummary) for outcome in outcomes.values()), outcomes
    assert diary.has_in_order("base: sparsify", "base: finetune", "distilled begins", "base ends")
    assert diary.has_in_order("teacher ends", "distilled begins")


def test_runs_that_build_on_each_other_end_as_they_do_one_after_the_other(
    family: dict[str, Recipe], tmp_path: Path, assert_same_outcome: Comparison
) -> None:
    for name, recipe in family.items():
        run_pipeline(recipe, tmp_path / name)
    for name in family:
        (tmp_path / name).rename(tmp_path / f"{name}-alone")
    run_side_by_side(at(tmp_path, family), jobs=3)
    for name in family:
        assert_same_outcome(tmp_path / name, tmp_path / f"{name}-alone", shared_generator=True)


def test_finetuning_begins_when_what_the_first_stage_leaves_is_written(base: Recipe, tmp_path: Path) -> None:
    files = RunFolder(tmp_path / "base").plan_path, tmp_path / "base" / "checkpoints" / "sparsified.pt"
    seen: list[bool] = []

    class Witness(RunObserver):
        def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
            seen.append(all(path.is_file() for path in files))

    run_pipeline(base, tmp_path / "base", observers=[Witness()])
    assert seen == [False, True]


@pytest.mark.parametrize("finetuning_has_begun", [True, False])
def test_a_first_stage_that_was_over_before_is_not_waited_for(
    finetuning_has_begun: bool, base: Recipe, dependent: Recipe, tmp_path: Path, stop_after: Stops
) -> None:
    # Six steps and the end of an epoch ask; the first stage has one.
    with pytest.raises(RunInterrupted, match="of finetune" if finetuning_has_begun else "after epoch 1 of sparsify"):
        run_pipeline(base, tmp_path / "base", should_stop=stop_after(9 if finetuning_has_begun else 7))
    diary = Diary(held="base", until="dependent")
    recipes = at(tmp_path, {"base": base, "dependent": dependent})
    outcomes = run_side_by_side(recipes, jobs=2, observers=[diary])
    assert all(isinstance(outcome, RunSummary) for outcome in outcomes.values()), outcomes
    assert diary.has_in_order("dependent begins", "base ends")


@pytest.mark.parametrize(("here", "named"), [("base", "{}/base"), ("nowhere/../base", "base"), ("link", "base")])
def test_a_base_is_waited_for_however_its_folder_is_named(
    here: str, named: str, small_recipe: Recipes, base: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "nowhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("base")
    dependent = small_recipe(*SHORT, "name=dependent", f"sparsify.from_run={named.format(tmp_path)}")
    outcomes = run_side_by_side({Path(here): base, Path("dependent"): dependent}, jobs=2)
    assert all(isinstance(outcome, RunSummary) for outcome in outcomes.values()), outcomes


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_whose_base_fails_are_not_begun_and_name_it(
    jobs: int, small_recipe: Recipes, dependent: Recipe, tmp_path: Path
) -> None:
    diary = Diary()
    recipes = {"base": small_recipe(*SHORT, "stage1.lr=1e18"), "dependent": dependent, "other": small_recipe(*SHORT)}
    outcomes = run_side_by_side(at(tmp_path, recipes), jobs=jobs, observers=[diary])
    assert isinstance(outcomes[tmp_path / "base"], TrainingDiverged)
    assert isinstance(outcomes[tmp_path / "other"], RunSummary)
    error = outcomes[tmp_path / "dependent"]
    assert isinstance(error, BaseRunFailed)
    assert str(error).startswith(
        f"not begun: it needs the first stage of {tmp_path / 'base'}, but that run failed: the loss became nan"
    )
    assert error.__cause__ is outcomes[tmp_path / "base"]
    assert "dependent begins" not in diary.entries
    assert not (tmp_path / "dependent").exists()


def test_runs_whose_teacher_fails_are_not_begun_and_name_it(family: dict[str, Recipe], tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "thesis.tex").write_text("mine")
    outcomes = run_side_by_side(at(tmp_path, family), jobs=2)
    assert isinstance(outcomes[tmp_path / "base"], RunSummary)
    needed = f"not begun: it needs {tmp_path / 'teacher'} as a finished teacher, but that run failed: "
    assert str(outcomes[tmp_path / "distilled"]).startswith(f"{needed}{tmp_path / 'teacher'} holds thesis.tex")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_base_that_fails_after_its_first_stage_has_done_its_part(
    jobs: int, small_recipe: Recipes, dependent: Recipe, tmp_path: Path
) -> None:
    recipes = at(tmp_path, {"base": small_recipe(*SHORT, "stage2.lr=1e18"), "dependent": dependent})
    outcomes = run_side_by_side(recipes, jobs=jobs)
    assert [type(outcome) for outcome in outcomes.values()] == [TrainingDiverged, RunSummary]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_first_stage_is_taken_over_from_a_base_that_cannot_go_on(
    jobs: int, small_recipe: Recipes, base: Recipe, dependent: Recipe, tmp_path: Path, stop_after: Stops
) -> None:
    with pytest.raises(RunInterrupted, match="of finetune"):
        run_pipeline(base, tmp_path / "base", should_stop=stop_after(9))
    other = small_recipe(*SHORT, "name=base", "stage2.lr=0.01")
    outcomes = run_side_by_side(at(tmp_path, {"base": other, "dependent": dependent}), jobs=jobs)
    assert "another recipe" in str(outcomes[tmp_path / "base"])
    assert isinstance(outcomes[tmp_path / "dependent"], RunSummary)


@pytest.mark.parametrize("is_finished", [True, False])
def test_runs_that_have_taken_over_a_first_stage_do_not_need_it_again(
    is_finished: bool, small_recipe: Recipes, base: Recipe, dependent: Recipe, tmp_path: Path, stop_after: Stops
) -> None:
    run_pipeline(base, tmp_path / "base")
    if is_finished:
        run_pipeline(dependent, tmp_path / "dependent")
    else:
        with pytest.raises(RunInterrupted):
            run_pipeline(dependent, tmp_path / "dependent", should_stop=stop_after(3))
    shutil.rmtree(tmp_path / "base")
    recipes = at(tmp_path, {"base": small_recipe(*SHORT, "stage1.lr=1e18"), "dependent": dependent})
    outcomes = run_side_by_side(recipes, jobs=2)
    assert [type(outcome) for outcome in outcomes.values()] == [TrainingDiverged, RunSummary]


def test_a_stop_ends_the_waiting_too(base: Recipe, dependent: Recipe, tmp_path: Path, stop_after: Stops) -> None:
    threads = set(threading.enumerate())
    recipes = at(tmp_path, {"base": base, "dependent": dependent})
    outcomes = run_side_by_side(recipes, jobs=2, should_stop=stop_after(4))
    assert [str(outcome) for outcome in outcomes.values()] == ["stopped in epoch 1 of sparsify", "not begun"]
    assert all(isinstance(outcome, RunInterrupted) for outcome in outcomes.values())
    assert not (tmp_path / "dependent").exists()
    assert set(threading.enumerate()) == threads


class Rehearsal:
    """Stands in for the pipeline: every run finishes its first stage when it is told to, and then ends."""

    def __init__(self, *told: str) -> None:
        self.begun: list[str] = []
        self._begins = {name: threading.Event() for name in told}
        self._goes_on = {name: threading.Event() for name in told}

    def __call__(self, recipe: Recipe, path: Path, **options: object) -> None:
        self.begun.append(path.name)
        if path.name in self._begins:
            self._begins[path.name].set()
            assert self._goes_on[path.name].wait(PATIENCE_SECONDS)
        (path / "checkpoints").mkdir(parents=True)
        for name in ("checkpoints/sparsified.pt", "plan.json"):
            (path / name).touch()

    def has_begun(self, name: str) -> bool:
        return self._begins[name].wait(PATIENCE_SECONDS)

    def goes_on(self, name: str) -> None:
        self._goes_on[name].set()


def test_of_the_runs_that_are_ready_the_first_begins(
    base: Recipe, dependent: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal = Rehearsal("base", "other", "last")
    monkeypatch.setattr("strucspars.train.side_by_side.run_pipeline", rehearsal)
    recipes = at(tmp_path, {"base": base, "dependent": dependent, "other": base, "second": dependent, "last": base})
    runs = threading.Thread(target=run_side_by_side, args=(recipes,), kwargs={"jobs": 2})
    runs.start()
    assert rehearsal.has_begun("other")
    assert rehearsal.begun == ["base", "other"]
    # A job becomes free before a first stage is over: the waiting ones are passed over, and are next when it is.
    rehearsal.goes_on("other")
    assert rehearsal.has_begun("last")
    rehearsal.goes_on("base")
    rehearsal.goes_on("last")
    runs.join(PATIENCE_SECONDS)
    assert rehearsal.begun == ["base", "other", "last", "dependent", "second"]


def test_one_at_a_time_runs_come_in_the_order_that_they_are_given_in(
    base: Recipe, dependent: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal = Rehearsal()
    monkeypatch.setattr("strucspars.train.side_by_side.run_pipeline", rehearsal)
    recipes = {"base": base, "dependent": dependent, "other": base}
    run_side_by_side(at(tmp_path, recipes), jobs=1)
    assert rehearsal.begun == ["base", "dependent", "other"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_run_waits_for_itself_or_a_later_one(
    jobs: int, small_recipe: Recipes, dependent: Recipe, tmp_path: Path
) -> None:
    itself = small_recipe(*SHORT, f"sparsify.from_run={tmp_path / 'itself'}")
    later = small_recipe(*SHORT, f"sparsify.from_run={tmp_path / 'dependent'}")
    recipes = {"itself": itself, "base": later, "dependent": dependent}
    outcomes = run_side_by_side(at(tmp_path, recipes), jobs=jobs)
    assert [type(outcome) for outcome in outcomes.values()] == [ValueError, ValueError, BaseRunFailed]
    assert all("is not a run that has finished its first stage" in str(outcome) for outcome in outcomes.values())


def test_several_processes_ask_the_run_itself_whether_it_can_begin(
    base: Recipe, dependent: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def diverging(recipe: Recipe, path: Path, **options: object) -> None:
        begun.append(path.name)
        raise TrainingDiverged("the loss became nan")

    # They may see different files for a moment; what a run refuses, they refuse together.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("strucspars.train.side_by_side.run_pipeline", diverging)
    run_side_by_side(at(tmp_path, {"base": base, "dependent": dependent}), jobs=1)
    assert begun == ["base", "dependent"]
