"""What is timed together, with runtimes that do as they are told and a clock that does not tick by itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strucspars.bench.networks import BenchForm, BenchNetwork
from strucspars.bench.results import BenchRow, RowSize
from strucspars.bench.runtimes import Images, InferenceForms, Program, Runtime
from strucspars.bench.suite import Contestant, Subject, TimingRules, timed_rows

SHAPE = (3, 4, 4)
SUBJECT = Subject(network="own", image_shape=SHAPE, build=list, runtimes=())
RULES = TimingRules(seconds=1.0, visit_seconds=0.001, warmup_calls=1, min_rounds=3, max_rounds=3)
SECONDS = {"dense": 8.0, "compressed": 4.0, "bound": 3.0}


@pytest.fixture
def contestants(tmp_path: Path) -> list[Contestant]:
    made = []
    forms: list[tuple[BenchForm, float | None]] = [("dense", None), ("compressed", 0.5), ("bound", 0.5)]
    for form, rate in forms:
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2)).eval()
        network = BenchNetwork(rate=rate, form=form, model=model)
        size = RowSize(
            params=1, macs=1, removed_conv_fraction=rate or 0.0, operation_ratio=1.0 if rate is None else 4.0
        )
        forms_of_it = InferenceForms(model, torch.zeros(1, *SHAPE), tmp_path)
        made.append(Contestant(network=network, forms=forms_of_it, size=size))
    return made


def told(clock: Any, name: str, contestants: list[Contestant], *, slow: float = 1.0, wrong: str = "") -> Runtime:
    """A runtime of known times per image, whose outputs are wrong for one form."""
    forms = {id(contestant.forms): contestant.network.form for contestant in contestants}

    def prepare(of: InferenceForms, images_per_call: int, threads: int) -> Program:
        form = forms[id(of)]

        def program(images: Images) -> Images:
            clock.program(f"{name} {form}", slow * SECONDS[form] * len(images))()
            assert len(images) == images_per_call
            with torch.no_grad():
                outputs: Images = of.model(torch.from_numpy(images)).numpy()
            return outputs + 1 if form == wrong else outputs

        return program

    # Names of runtimes are those of tables.
    return Runtime(name=name, title=name, package="torch", install="", prepare=prepare)


def rows_of(clock: Any, contestants: list[Contestant], *runtimes: Runtime, batch: int = 1) -> list[BenchRow]:
    return timed_rows(SUBJECT, contestants, runtimes, batch, 1, RULES, clock=clock)


def timings(rows: list[BenchRow], value: Callable[[Any], Any]) -> list[Any]:
    return [value(row.timing) for row in rows]


def test_speedups_are_those_of_the_times(clock: Any, contestants: list[Contestant]) -> None:
    fast, slow = (told(clock, name, contestants, slow=factor) for name, factor in (("pytorch", 1), ("openvino", 2)))
    rows = rows_of(clock, contestants, fast, slow)
    assert [(row.runtime, row.form) for row in rows] == [
        (name, form) for name in ("pytorch", "openvino") for form in ("dense", "compressed", "bound")
    ]
    assert timings(rows, lambda timing: (timing.ms_low, timing.ms_high))[0] == (8000, 8000)
    assert timings(rows, lambda timing: (timing.rounds, timing.calls))[0] == (3, 3)
    assert timings(rows, lambda timing: timing.ms) == [8000, 4000, 3000, 16000, 8000, 6000]
    assert timings(rows, lambda timing: timing.speedup.median) == pytest.approx([1, 2, 8 / 3, 1, 2, 8 / 3])
    assert timings(rows, lambda timing: timing.speedup_over_best.median) == pytest.approx([1, 2, 8 / 3, 0.5, 1, 4 / 3])


def test_wrong_outputs_are_an_error_row_and_never_timed(clock: Any, contestants: list[Contestant]) -> None:
    rows = rows_of(clock, contestants, told(clock, "pytorch", contestants, wrong="compressed"))
    dense, compressed, bound = rows
    assert compressed.timing is None
    assert compressed.difference is not None
    assert compressed.difference > 1e-4
    assert "the output is off by" in compressed.error
    # Once for the check.
    assert clock.called.count("pytorch compressed") == 1
    assert dense.timing is not None
    assert bound.timing is not None
    assert bound.timing.speedup is not None


def test_a_network_that_puts_out_no_numbers_is_refused(clock: Any, contestants: list[Contestant]) -> None:
    nn.init.constant_(contestants[0].network.model[1].weight, float("nan"))  # type: ignore[index]  # a Sequential
    with pytest.raises(ValueError, match="NaN or infinity"):
        rows_of(clock, contestants, told(clock, "pytorch", contestants))


def test_a_runtime_that_fails_takes_no_other_with_it(clock: Any, contestants: list[Contestant]) -> None:
    def prepare(forms: InferenceForms, images_per_call: int, threads: int) -> Program:
        raise RuntimeError("unknown operation\nand a long trace")

    failing = Runtime(name="openvino", title="OpenVINO", package="torch", install="", prepare=prepare)
    rows = rows_of(clock, contestants, failing, told(clock, "pytorch", contestants))
    assert {row.error for row in rows if row.runtime == "openvino"} == {"not timed: RuntimeError: unknown operation"}
    assert all(row.timing is not None for row in rows if row.runtime == "pytorch")
    assert {(row.runtime, row.num_gathers, row.gathered_bytes) for row in rows} == {
        ("openvino", None, None),
        ("pytorch", 0, 0),
    }


def test_without_a_right_dense_network_there_is_no_speedup(clock: Any, contestants: list[Contestant]) -> None:
    rows = rows_of(clock, contestants, told(clock, "pytorch", contestants, wrong="dense"))
    assert rows[0].timing is None
    assert rows[1].timing is not None
    timing = rows[1].timing
    assert (timing.speedup, timing.speedup_over_best) == (None, None)


def test_a_batch_is_timed_at_once_and_one_by_one(clock: Any, contestants: list[Contestant]) -> None:
    rows = rows_of(clock, contestants, told(clock, "pytorch", contestants), batch=2)
    assert [row.images_per_call for row in rows] == [2, 1, 2, 1, 2, 1]
    assert timings(rows, lambda timing: timing.ms) == [16000, 16000, 8000, 8000, 6000, 6000]
    assert timings(rows, lambda timing: timing.frames_per_second)[0] == 1 / 8


def test_ways_are_compared_with_the_dense_network_run_in_the_same_way(
    clock: Any, contestants: list[Contestant]
) -> None:
    def prepare(of: InferenceForms, images_per_call: int, threads: int) -> Program:
        quick = told(clock, "quick", contestants, slow=0.25).prepare(of, images_per_call, threads)
        slow = told(clock, "slow", contestants).prepare(of, images_per_call, threads)
        # One by one, the dense network gains more than the others.
        return quick if images_per_call == 1 and of is contestants[0].forms else slow

    runtime = replace(told(clock, "pytorch", contestants), prepare=prepare)
    rows = rows_of(clock, contestants, runtime, batch=2)
    assert [(row.form, row.images_per_call) for row in rows[:4]] == [
        ("dense", 2),
        ("dense", 1),
        ("compressed", 2),
        ("compressed", 1),
    ]
    assert timings(rows, lambda timing: timing.ms)[:4] == [16000, 4000, 8000, 8000]
    assert timings(rows, lambda timing: timing.speedup.median)[:4] == [1, 1, 2, 0.5]
    # The best of all ways, whichever it is.
    assert timings(rows, lambda timing: timing.speedup_over_best.median)[:4] == [0.25, 1, 0.5, 0.5]


def test_outputs_that_the_next_call_overwrites_are_kept(clock: Any, contestants: list[Contestant]) -> None:
    def prepare(of: InferenceForms, images_per_call: int, threads: int) -> Program:
        program, memory = (
            told(clock, "pytorch", contestants).prepare(of, images_per_call, threads),
            np.empty((images_per_call, 2), np.float32),
        )

        def overwriting(images: Images) -> Images:
            memory[:] = program(images)
            return memory

        return overwriting

    rows = rows_of(clock, contestants, replace(told(clock, "pytorch", contestants), prepare=prepare), batch=3)
    assert [row.error for row in rows] == [""] * 6


def test_programs_get_the_threads_and_images_of_the_sitting(clock: Any, contestants: list[Contestant]) -> None:
    targets: list[tuple[int, int]] = []
    shown: list[Images] = []
    runtime = told(clock, "pytorch", contestants)

    def prepare(of: InferenceForms, images_per_call: int, threads: int) -> Program:
        targets.append((images_per_call, threads))
        program = runtime.prepare(of, images_per_call, threads)

        def watched(images: Images) -> Images:
            shown.append(images)
            return program(images)

        return watched

    timed_rows(SUBJECT, contestants[:1], [replace(runtime, prepare=prepare)], 2, 3, RULES, clock=clock)
    assert targets == [(2, 3), (1, 3)]
    # Zeros would hide most of what a runtime can get wrong.
    assert all(images.std() > 0.5 for images in shown)
    assert not np.array_equal(shown[0][0], shown[0][1])


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), TypeError("out of memory"), KeyError("out of memory")]
)
def test_a_program_that_fails_in_any_way_still_tells_its_gathers(
    error: Exception, clock: Any, contestants: list[Contestant]
) -> None:
    def program(images: Images) -> Images:
        raise error

    failing = replace(told(clock, "pytorch", contestants), prepare=lambda of, images_per_call, threads: program)
    for row in rows_of(clock, contestants, failing):
        assert row.error.startswith(f"not timed: {type(error).__name__}: ")
        assert (row.num_gathers, row.gathered_bytes, row.timing) == (0, 0, None)


def test_contestants_take_turns_across_runtimes(clock: Any, contestants: list[Contestant]) -> None:
    rows_of(clock, contestants, told(clock, "pytorch", contestants), told(clock, "openvino", contestants))
    # One call each for the check, the warm-up, and three rounds of which the second goes backwards.
    order = clock.called[:6]
    assert clock.called == [*order, *order, *order, *reversed(order), *order]


def test_what_is_done_is_told(clock: Any, contestants: list[Contestant]) -> None:
    said: list[tuple[str, float]] = []
    runtimes = [told(clock, "pytorch", contestants)]
    timed_rows(SUBJECT, contestants, runtimes, 1, 1, RULES, lambda *words: said.append(words), clock=clock)
    assert all(0 <= done <= 1 for _, done in said)
    assert any("preparing pytorch" in words for words, _ in said)
    assert "own, 4 x 4, batch 1, 1 thread: timing 3 programs, round 3" in said[-1][0]


def test_int8_is_compared_with_dense_int8_and_dense_float32(clock: Any, contestants: list[Contestant]) -> None:
    float32 = told(clock, "openvino", contestants)
    int8 = replace(told(clock, "openvino-int8", contestants, slow=0.25), is_int8=True)
    rows = rows_of(clock, contestants, float32, int8)
    assert timings(rows, lambda timing: timing.speedup_over_best.median) == pytest.approx([1, 2, 8 / 3] * 2)
    assert timings(rows[:3], lambda timing: timing.speedup_over_float32) == [None] * 3
    assert timings(rows[3:], lambda timing: timing.speedup_over_float32.median) == pytest.approx([4, 8, 32 / 3])


def test_int8_outputs_may_be_off_but_not_unrelated(clock: Any, contestants: list[Contestant]) -> None:
    for off, is_timed in ((1.1, True), (-1.0, False)):
        exact = told(clock, "openvino-int8", contestants)

        def prepare(forms: InferenceForms, images: int, threads: int, exact: Runtime = exact, off: float = off) -> Any:
            program = exact.prepare(forms, images, threads)
            return lambda given: off * program(given)

        rows = rows_of(clock, contestants, replace(exact, prepare=prepare, is_int8=True))
        assert {row.timing is not None for row in rows} == {is_timed}
