"""What the tests of the bench share: a clock that moves only when told, and reports without measurements."""

from collections.abc import Callable

import pytest

from strucspars.bench.results import BenchReport, BenchRow, MissingRuntime, Ratio, RowSize, RowTiming


class FakeClock:
    """Seconds that pass only while a program says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called: list[str] = []

    def __call__(self) -> float:
        return self.now

    def program(self, name: str, seconds: float | Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            self.called.append(name)
            self.now += seconds() if callable(seconds) else seconds

        return run


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def size(*, params: int = 100, operation_ratio: float = 1.0, removed: float = 0.0) -> RowSize:
    return RowSize(params=params, macs=1000, removed_conv_fraction=removed, operation_ratio=operation_ratio)


def timing(ms: float, speedup: float) -> RowTiming:
    ratio = Ratio(median=speedup, low=speedup, high=speedup)
    return RowTiming(
        ms=ms,
        ms_low=ms - 1,
        ms_high=ms + 1,
        frames_per_second=1000 / ms,
        rounds=3,
        calls=9,
        speedup=ratio,
        speedup_over_best=ratio,
    )


def row(**changes: object) -> BenchRow:
    fields: dict[str, object] = {
        "network": "resnet50",
        "image_shape": (3, 224, 224),
        "rate": None,
        "form": "dense",
        "runtime": "onnxruntime",
        "batch": 1,
        "images_per_call": 1,
        "threads": 1,
        "size": size(),
        "num_gathers": 0,
        "gathered_bytes": 0,
        "difference": 1e-7,
        "error": "",
        "timing": timing(80.0, 1.0),
    }
    return BenchRow(**(fields | changes))  # type: ignore[arg-type]  # fields of several types


@pytest.fixture
def make_row() -> Callable[..., BenchRow]:
    return row


@pytest.fixture
def report() -> BenchReport:
    compressed = size(params=36, operation_ratio=2.43, removed=0.657)
    gathers = {"num_gathers": 67, "gathered_bytes": 67_000_000}
    return BenchReport(
        command="strucspars bench resnet50",
        commit="0123456789ab",
        hardware={"cpu": "some processor", "cores": 2},
        versions={"torch": "2.15", "openvino": None},
        settings={"seconds": 1},
        rows=(
            row(),
            row(rate=0.65, form="compressed", size=compressed, timing=timing(40.0, 2.0), **gathers),
            row(rate=0.65, form="bound", size=compressed, timing=timing(33.0, 2.4)),
            row(
                rate=0.85,
                form="compressed",
                size=compressed,
                difference=0.5,
                error="not timed: wrong",
                timing=None,
                **gathers,
            ),
        ),
        missing=(MissingRuntime(name="openvino", title="OpenVINO", install="pip install openvino"),),
    )
