"""Interleaved timing, with a clock that does not tick by itself."""

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.bench.results import Ratio
from strucspars.bench.suite import TimingRules, interleaved_times, paired_ratio, quartiles

ONE_CALL = TimingRules(seconds=1.0, visit_seconds=0.001, warmup_calls=1, min_rounds=4, max_rounds=4)


def test_every_contestant_has_its_turn_in_every_round_and_the_order_turns_round(clock: Any) -> None:
    programs = {name: clock.program(name, 1.0) for name in "abc"}
    interleaved_times(programs, ONE_CALL, clock=clock)
    assert "".join(clock.called) == "abc" + "abc" + "cba" + "abc" + "cba"


def test_calls_are_as_many_as_fill_a_visit_after_one_that_does_not_count(clock: Any) -> None:
    rules = TimingRules(seconds=1, visit_seconds=1.0, warmup_calls=2, min_rounds=1, max_rounds=1)
    times = interleaved_times({"a": clock.program("a", 0.25)}, rules, clock=clock)
    assert times["a"] == ((0.25,) * 4,)
    assert len(clock.called) == 2 + 1 + 4


def test_calls_that_do_not_divide_a_visit_fill_it_and_go_beyond(clock: Any) -> None:
    rules = TimingRules(seconds=1, visit_seconds=1.0, warmup_calls=1, min_rounds=1, max_rounds=1)
    assert interleaved_times({"a": clock.program("a", 0.375)}, rules, clock=clock)["a"] == ((0.375,) * 3,)


def test_a_slow_first_call_does_not_make_visits_shorter(clock: Any) -> None:
    rules = TimingRules(seconds=1, visit_seconds=1.0, warmup_calls=2, min_rounds=1, max_rounds=1)
    program = clock.program("a", lambda: 8.0 if len(clock.called) == 1 else 0.25)
    assert interleaved_times({"a": program}, rules, clock=clock)["a"] == ((0.25,) * 4,)


def test_a_call_longer_than_a_visit_is_timed_once_without_another_before(clock: Any) -> None:
    times = interleaved_times({"slow": clock.program("slow", 9.0)}, ONE_CALL, clock=clock)
    assert times["slow"] == ((9.0,),) * 4
    assert len(clock.called) == 1 + 4


def test_calls_of_no_time_at_all_are_limited(clock: Any) -> None:
    rules = TimingRules(seconds=1, max_calls=7, min_rounds=1, max_rounds=1)
    assert interleaved_times({"a": clock.program("a", 0.0)}, rules, clock=clock)["a"] == ((0.0,) * 7,)


def test_time_runs_out_before_the_round_that_would_not_fit(clock: Any) -> None:
    rules = TimingRules(seconds=10.0, visit_seconds=0.001, warmup_calls=1, min_rounds=1)
    times = interleaved_times({"a": clock.program("a", 1.0), "b": clock.program("b", 2.0)}, rules, clock=clock)
    # Three seconds of warm-up and two rounds of three; another would end after twelve.
    assert len(times["a"]) == len(times["b"]) == 2
    assert clock.now <= 10


def test_the_next_round_is_expected_to_take_as_long_as_the_longest_one(clock: Any) -> None:
    # Warm-up and rounds. The second fits exactly; after the third, another like the second would end after 13 seconds.
    seconds = [1.0, 1.0, 5.0, 1.0, 1.0, 1.0]
    rules = TimingRules(seconds=12.0, visit_seconds=0.001, warmup_calls=1, min_rounds=1)
    program = clock.program("a", lambda: seconds[len(clock.called) - 1])
    assert interleaved_times({"a": program}, rules, clock=clock)["a"] == ((1.0,), (5.0,), (1.0,))


def test_rounds_enough_for_a_spread_come_first_and_time_second(clock: Any) -> None:
    rules = TimingRules(seconds=1.0, visit_seconds=0.001, min_rounds=3)
    assert len(interleaved_times({"a": clock.program("a", 60.0)}, rules, clock=clock)["a"]) == 3


def test_each_round_is_told_with_the_time_so_far(clock: Any) -> None:
    told: list[tuple[int, float]] = []
    interleaved_times({"a": clock.program("a", 1.0)}, ONE_CALL, clock=clock, on_round=lambda *said: told.append(said))
    assert told == [(1, 2.0), (2, 3.0), (3, 4.0), (4, 5.0)]


def test_nothing_to_time_takes_no_time(clock: Any) -> None:
    assert interleaved_times({}, ONE_CALL, clock=clock) == {}


def test_garbage_is_collected_again_afterwards_also_after_an_error(clock: Any) -> None:
    def fails() -> None:
        assert not gc.isenabled()
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        interleaved_times({"a": fails}, ONE_CALL, clock=clock)
    assert gc.isenabled()


def test_garbage_collection_that_was_off_stays_off(clock: Any) -> None:
    gc.disable()
    try:
        interleaved_times({"a": clock.program("a", 1.0)}, ONE_CALL, clock=clock)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_medians_and_quartiles_are_those_of_all_calls() -> None:
    assert quartiles(((1.0, 2.0, 3.0), (4.0, 100.0))) == tuple(np.percentile([1, 2, 3, 4, 100], (25, 50, 75)))


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_a_bench_takes_a_positive_number_of_seconds(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be a positive number"):
        TimingRules(seconds=seconds)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_what_slows_a_whole_round_down_does_not_change_the_ratio(noise: list[float]) -> None:
    dense = tuple((8.0 * slow,) for slow in noise)
    fast = tuple((2.0 * slow,) for slow in noise)
    ratio = paired_ratio(dense, fast)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((4, 4, 4))


def test_the_spread_of_a_ratio_is_that_of_the_rounds() -> None:
    ratio = paired_ratio(((2.0,), (4.0,), (6.0,)), ((1.0,), (1.0,), (1.0,)))
    assert ratio == Ratio(median=4.0, low=3.0, high=5.0)
