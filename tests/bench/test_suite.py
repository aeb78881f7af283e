"""A whole bench of a tiny network."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch

from strucspars.bench import runtimes
from strucspars.bench.networks import random_networks
from strucspars.bench.results import BenchReport, report_from_json
from strucspars.bench.suite import BenchSettings, Subject, bench
from strucspars.bench.timing import TimingRules

SHAPE = (3, 16, 16)
RULES = TimingRules(seconds=0.01, visit_seconds=0.001, warmup_calls=1, max_calls=1, min_rounds=2, max_rounds=2)


@pytest.fixture
def measured() -> Callable[..., BenchReport]:
    def measure(**settings: Any) -> BenchReport:
        build = partial(random_networks, "cifar-resnet8", [0.5], image_shape=SHAPE, num_classes=5)
        subject = Subject(name="small", image_shape=SHAPE, networks=build, settings=BenchSettings(**settings))
        return bench([subject], rules=RULES)

    return measure


def test_every_batch_is_timed_with_every_number_of_threads(
    measured: Callable[..., BenchReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", wanted.append)
    report = measured(runtimes=("pytorch",), batches=(1, 2), threads=(1, 2))
    assert [(row.threads, row.batch, row.images_per_call, row.form) for row in report.rows] == [
        (threads, batch, at_once, form)
        for threads in (1, 2)
        for batch, ways in ((1, (1,)), (2, (2, 1)))
        for form in ("dense", "compressed", "bound")
        for at_once in ways
    ]
    assert wanted[::2] == [1, 1, 2, 2]
    assert all(row.timing is not None and row.timing.rounds == 2 for row in report.rows)
    assert report_from_json(report.to_json()).rows == report.rows


def test_sizes_are_those_of_the_networks(measured: Callable[..., BenchReport]) -> None:
    dense, compressed, bound = (row.size for row in measured(runtimes=("pytorch",)).rows)
    assert dense.operation_ratio == 1
    assert compressed.operation_ratio == dense.macs / compressed.macs > 1
    assert compressed.gathers > 0
    assert compressed.gathered_bytes > 0
    assert bound == type(bound)(**(vars(compressed) | {"gathers": 0, "gathered_bytes": 0}))


def test_a_missing_runtime_is_reported_and_the_others_are_timed(
    measured: Callable[..., BenchReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = runtimes.Runtime(
        name="openvino", title="OpenVINO", package="no_such_package", install="pip install it", prepare=_never
    )
    monkeypatch.setattr(runtimes, "RUNTIMES", MappingProxyType({**runtimes.RUNTIMES, "openvino": absent}))
    report = measured(runtimes=("openvino", "pytorch"))
    assert [(each.name, each.install) for each in report.missing] == [("openvino", "pip install it")]
    assert {row.runtime for row in report.rows} == {"pytorch"}
    assert measured(runtimes=("openvino",)).rows == ()


def test_a_report_says_what_it_was_measured_on(measured: Callable[..., BenchReport]) -> None:
    report = measured(runtimes=("pytorch",))
    assert report.versions["torch"]
    assert {"onnxruntime", "openvino"} <= set(report.versions)
    assert report.hardware["cores"]
    (subject,) = report.settings["subjects"]
    assert (subject["network"], subject["batches"]) == ("small", (1,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runtimes": ("tensorrt",)}, "no runtime 'tensorrt'"),
        ({"runtimes": ()}, "runtimes must name something"),
        ({"batches": (1, 1)}, "nothing twice"),
        ({"batches": (0,)}, "from 1 on, got 0"),
        ({"threads": (-1,)}, "from 1 on, got -1"),
        ({"widen_groups_below": 0}, "widen_groups_below must be a whole number from 1 on"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchSettings(**settings)


def _never(forms: object, target: object) -> Any:
    raise AssertionError("a runtime that is not there was asked for something")
