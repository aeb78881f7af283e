from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run import RunInterrupted
from strucspars.train.run_folder import RunFolder


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events: Any = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_events_hold_the_metrics_once_also_of_a_run_that_was_stopped(
    small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    for questions in (9, 8):
        answers = chain(repeat(False, questions), repeat(True))
        with pytest.raises(RunInterrupted):
            run_pipeline(small_recipe(), tmp_path / "run", should_stop=answers.__next__)
    run_pipeline(small_recipe(), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    written = scalars(folder.tensorboard)
    for number, row in enumerate(folder.metrics(), start=1):
        for key in ("test_top1", "test_loss"):
            values = dict(written[f"{row['stage']}/{key}"])
            assert values[number] == pytest.approx(row[key], rel=1e-6)
    assert [step for step, _ in written["finetune/test_top1"]] == [4, 5]
