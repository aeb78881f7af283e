"""A whole bench of a tiny network."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from strucspars.bench import runtimes, suite
from strucspars.bench.networks import random_networks
from strucspars.bench.results import BenchReport, report_from_json
from strucspars.bench.runtimes import InferenceForms
from strucspars.bench.suite import Subject, TimingRules, bench
from strucspars.convert.fold import fold

SHAPE = (3, 16, 16)
RULES = TimingRules(seconds=0.01, visit_seconds=0.001, warmup_calls=1, max_calls=1, min_rounds=2, max_rounds=2)


@pytest.fixture
def measured() -> Callable[..., BenchReport]:
    def measure(rate: float = 0.5, **settings: Any) -> BenchReport:
        build = partial(random_networks, "cifar-resnet8", [rate], image_shape=SHAPE, num_classes=5)
        subject = Subject(network="small", image_shape=SHAPE, build=build, **settings)
        return bench(subject, rules=RULES)

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
    rows = measured(runtimes=("pytorch",)).rows
    dense, compressed, bound = (row.size for row in rows)
    assert dense.operation_ratio == 1
    assert compressed.operation_ratio == dense.macs / compressed.macs > 1
    assert bound == compressed
    assert [row.num_gathers == row.gathered_bytes == 0 for row in rows] == [True, False, True]


def test_rows_tell_the_gathers_of_the_graph_that_was_timed() -> None:
    networks = random_networks("cifar-resnet8", [0.6], image_shape=SHAPE, num_classes=5)[1:2]
    runtimes = ("onnxruntime", "pytorch")
    report = bench(Subject(network="small", image_shape=SHAPE, build=lambda: networks, runtimes=runtimes), rules=RULES)
    gathers = {row.runtime: (row.num_gathers, row.gathered_bytes) for row in report.rows}
    # By default, groups are widened for ONNX Runtime, not for PyTorch.
    assert gathers["onnxruntime"] < gathers["pytorch"]


def test_networks_are_folded_with_an_image_that_is_not_blank(
    measured: Callable[..., BenchReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    examples: list[torch.Tensor] = []

    def watched(model: nn.Module, example: torch.Tensor, **options: Any) -> fx.GraphModule:
        examples.append(example)
        return fold(model, example, **options)

    monkeypatch.setattr(runtimes, "fold", watched)
    measured(runtimes=("pytorch",))
    assert len(examples) == 3
    assert all(example.std() > 0.5 for example in examples)


def test_every_network_has_a_folder_of_its_own_and_the_width_of_groups_that_was_asked_for(
    measured: Callable[..., BenchReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Path, int | None]] = []

    def watched(model: nn.Module, example: torch.Tensor, folder: Path, **options: Any) -> InferenceForms:
        assert folder.is_dir()
        made.append((folder, options.get("widen_groups_below")))
        return InferenceForms(model, example, folder, **options)

    monkeypatch.setattr(suite, "InferenceForms", watched)
    measured(runtimes=("pytorch",), widen_groups_below=8)
    # Files have the same name in each.
    assert len({folder for folder, _ in made}) == 3
    assert [width for _, width in made] == [8, 8, 8]


def test_a_missing_runtime_is_reported_and_the_others_are_timed(
    measured: Callable[..., BenchReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = runtimes.Runtime(
        name="openvino",
        title="OpenVINO",
        package="no_such_package",
        install="pip install it",
        prepare=_never,
    )
    monkeypatch.setattr(runtimes, "RUNTIMES", {**runtimes.RUNTIMES, "openvino": absent})
    report = measured(runtimes=("openvino", "pytorch"))
    assert [(each.name, each.install) for each in report.missing] == [("openvino", "pip install it")]
    assert {row.runtime for row in report.rows} == {"pytorch"}
    assert measured(runtimes=("openvino",)).rows == ()


def test_nothing_is_built_where_every_runtime_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("openvino", "torch-compile")
    absent = {name: replace(runtimes.RUNTIMES[name], package="no_such_package") for name in names}
    monkeypatch.setattr(runtimes, "RUNTIMES", {**runtimes.RUNTIMES, **absent})
    report = bench(Subject(network="none", image_shape=SHAPE, build=_never_built, runtimes=names), rules=RULES)
    assert [each.name for each in report.missing] == ["openvino", "torch-compile"]
    assert report.rows == ()
    assert report.settings["timing"] == asdict(RULES)


def test_a_report_says_what_it_was_measured_on(measured: Callable[..., BenchReport]) -> None:
    report = measured(runtimes=("pytorch",))
    assert report.versions["torch"]
    assert {"onnxruntime", "openvino"} <= set(report.versions)
    assert report.hardware["cores"]
    (subject,) = report.settings["subjects"]
    assert (subject["network"], subject["batches"]) == ("small", (1,))


def _never_built() -> Any:
    raise AssertionError("a network was built for which there is no runtime")


def _never(*arguments: object) -> Any:
    raise AssertionError("a runtime that is not there was asked for something")
