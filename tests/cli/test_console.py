"""Progress as lines that move, and as lines per epoch."""

import io
import re
import threading
from typing import Any

import pytest
from rich.console import Console

from strucspars.cli.console import RunProgress
from strucspars.train.observer import RunObserver

ROW = {
    "stage": "sparsify",
    "epoch": 1,
    "train_loss": 0.5,
    "test_top1": 0.75,
    "lambda": 2e-6,
    "removed_fraction": 0.125,
    "train_seconds": 2.0,
    "seconds": 3.0,
}
COMPRESSION = {"stage": "compress", "epoch": 0, "before_top1": 0.9, "test_top1": 0.5, "removed_param_fraction": 0.6}


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def terminal(width: int = 120, **options: Any) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, color_system="standard", _environ={}, **options
    )


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def go_through(observer: RunObserver, run: str, *, epochs: int = 2) -> None:
    observer.stage_started(run, "sparsify", epochs=epochs, steps=10, done_epochs=0)
    for epoch in range(1, epochs + 1):
        for step in range(1, 11):
            observer.steps_done(run, epoch=epoch, step=step)
        observer.epoch_done(run, {**ROW, "epoch": epoch})
    observer.epoch_done(run, COMPRESSION)


def test_progress_is_an_observer() -> None:
    observer: RunObserver = RunProgress(plain_console())
    assert observer is not None


def test_without_a_terminal_there_is_a_line_per_epoch() -> None:
    console = plain_console()
    with RunProgress(console) as progress:
        progress.run_started("mine")
        go_through(progress, "mine")
        progress.run_ended("mine", "a [word] at the end")
    numbers = "loss 0.500  acc 75.00%  removed 12.5%  lambda 2.0e-06  5 steps/s"
    assert text_of(console).splitlines() == [
        f"mine  sparsify  epoch 1/2  {numbers}",
        f"mine  sparsify  epoch 2/2  {numbers}",
        "mine: compressed, 60.0% of the parameters removed: accuracy 90.00% before, 50.00% after",
        "mine: a [word] at the end",
    ]


def test_a_resumed_stage_says_from_where() -> None:
    console = plain_console()
    with RunProgress(console) as progress:
        progress.run_started("mine")
        progress.stage_started("mine", "finetune", epochs=5, steps=10, done_epochs=3)
    assert text_of(console) == "mine: finetune continues after epoch 3 of 5\n"


@pytest.mark.parametrize("console", [plain_console(), terminal()])
def test_quiet_progress_says_nothing(console: Console) -> None:
    with RunProgress(console, quiet=True) as progress:
        progress.run_started("mine")
        go_through(progress, "mine")
        progress.stopping()
        progress.run_ended("mine", "finished")
    assert text_of(console) == ""


def test_a_terminal_shows_all_numbers_on_one_line() -> None:
    console = terminal(width=160)
    with RunProgress(console) as progress:
        progress.run_started("mine")
        go_through(progress, "mine", epochs=1)
        progress.stopping()
    text = re.sub(r"\x1b\[[0-9;]*m", "", text_of(console))
    line = (
        r"mine  sparsify  epoch 1/1  \d+ steps/s  0:00:00 left  loss 0.500  acc 75.00%  removed 12.5%  lambda 2.0e-06"
    )
    assert re.search(line, text)
    hides, shows = "\x1b[?25l", "\x1b[?25h"
    assert text_of(console).rindex(shows) > text_of(console).rindex(hides)


def test_a_narrow_terminal_gets_the_first_numbers() -> None:
    console = terminal(width=60)
    with RunProgress(console) as progress:
        progress.run_started("mine")
        go_through(progress, "mine", epochs=1)
        progress.stopping()
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text_of(console)))
    assert any("steps/s" in line for line in lines)
    assert not any("lambda" in line for line in lines)
    assert max(len(line) for line in lines if "mine  sparsify" in line) <= 60


def test_runs_in_many_threads_do_not_disturb_each_other() -> None:
    console = plain_console()
    with RunProgress(console) as progress:

        def one(run: str) -> None:
            progress.run_started(run)
            go_through(progress, run, epochs=20)
            progress.stopping()
            progress.run_ended(run, "finished")

        threads = [threading.Thread(target=one, args=(f"run{number}",)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = text_of(console).splitlines()
    for number in range(8):
        epochs = [line for line in lines if line.startswith(f"run{number}  sparsify")]
        assert [line.split()[3] for line in epochs] == [f"{epoch}/20" for epoch in range(1, 21)]
    assert sum(line.startswith("stopping") for line in lines) == 1


def test_the_pace_counts_from_where_a_run_resumed() -> None:
    now = [100.0]
    console = terminal(get_time=lambda: now[0])
    with RunProgress(console) as progress:
        progress.run_started("mine")
        progress.stage_started("mine", "finetune", epochs=10, steps=100, done_epochs=8)
        for step in range(50, 61):
            now[0] += 1.0
            progress.steps_done("mine", epoch=9, step=step)
        progress.stopping()
    # Steps 850 to 860 of 1000, one per second.
    assert "1 steps/s  0:02:20 left" in text_of(console)


def test_a_slimmed_network_has_lost_channels() -> None:
    console = plain_console()
    row = {"stage": "compress", "epoch": 0, "before_top1": 0.9, "test_top1": 0.5, "removed_channel_fraction": 0.4}
    with RunProgress(console) as progress:
        progress.run_started("mine")
        progress.epoch_done("mine", row | {"removed_param_fraction": 0.6})
    assert text_of(console) == "mine: compressed, 40.0% of the channels removed: accuracy 90.00% before, 50.00% after\n"
