"""Implementations are timed once, and only correct ones are chosen."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strucspars.io.files import user_cache
from strucspars.kernels.cache import Tuner
from strucspars.kernels.fused_conv import FusedConv
from strucspars.kernels.kernel import Call, Kernel, Run, signature
from strucspars.kernels.registry import KERNELS, ConvProblem, register_kernel
from strucspars.kernels.stock import StockConv
from strucspars.kernels.tuning import Problem, timed_implementations

CONV = FusedConv(weight=torch.ones(4, 2, 1, 1), bias=torch.zeros(4), groups=2)
CALL = Call(input_shape=(1, 4, 3, 3), has_residual=False, dtype=torch.float32, device=torch.device("cpu"))


@dataclass
class Doubled(Problem):
    """Twice a tensor: correctly, slowly, wrongly, not at all, and with an entry that is not written."""

    calls: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def signature(self) -> str:
        return "doubled"

    def inputs(self) -> tuple[Tensor | None, ...]:
        return (torch.ones(3),)

    def expected(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        return torch.full((3,), 2.0)

    def implementations(self) -> Iterator[tuple[str, str]]:
        yield from (("doubled", option) for option in ("slow", "quick", "wrong", "failing", "partial"))

    def prepare(self, kernel: str, option: str) -> Callable[..., Tensor]:
        def run(x: Tensor) -> Tensor:
            self.calls += 1
            if option == "failing":
                raise RuntimeError("out of resources")
            result = x * (2.1 if option == "wrong" else 2.0)
            if option == "partial":
                result[1] = torch.nan
            return result

        return run


def fake_timer() -> Callable[[Callable[[], object]], float]:
    """The first takes two milliseconds, the others one."""
    times = iter([2.0])
    return lambda run: next(times, 1.0)


def test_the_quickest_correct_implementation_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = timed_implementations(Doubled(), fake_timer())
    assert [(each.option, each.ms) for each in found] == [("quick", 1.0), ("slow", 2.0)]
    assert "doubled (wrong) is off" in caplog.text
    assert "doubled (partial) is off" in caplog.text
    assert "out of resources" in caplog.text


def test_times_are_kept_for_the_next_time() -> None:
    first = Tuner("a GPU", fake_timer()).timed(Doubled())
    again = Doubled()
    assert Tuner("a GPU", fake_timer()).timed(again) == first
    assert again.calls == 0
    Tuner("another GPU", fake_timer()).timed(again)
    assert again.calls > 0


def test_a_damaged_file_of_times_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    tuner = Tuner("a GPU", fake_timer())
    first = tuner.timed(Doubled())
    (path,) = user_cache("kernels").iterdir()
    path.write_text("{}")
    assert Tuner("a GPU", fake_timer()).timed(Doubled()) == first
    assert "timed again" in caplog.text


def test_times_that_cannot_be_kept_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRUCSPARS_CACHE", str(tmp_path / "file"))
    assert Tuner("a GPU", fake_timer()).timed(Doubled())
    assert "not kept" in caplog.text


def test_a_registered_kernel_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twin(Kernel):
        def supports(self, conv: FusedConv, call: Call) -> bool:
            return True

        def options(self, conv: FusedConv, call: Call) -> tuple[str, ...]:
            return ("only",)

        def prepare(self, conv: FusedConv, call: Call, option: str) -> Run:
            return StockConv().prepare(conv, call, "dense")

    monkeypatch.setattr(KERNELS, "_entries", dict(KERNELS._entries))
    register_kernel("twin", Twin())
    found = timed_implementations(ConvProblem(CONV, CALL), lambda run: 1.0)
    assert ("twin", "only") in [(each.kernel, each.option) for each in found]


def test_signatures_tell_apart_what_takes_other_times() -> None:
    order = torch.tensor([2, 3, 0, 1])
    others = [
        FusedConv(weight=CONV.weight, bias=CONV.bias, groups=2, relu=True),
        FusedConv(weight=CONV.weight, bias=CONV.bias, groups=2, in_order=order),
        FusedConv(weight=CONV.weight, bias=CONV.bias, groups=2, out_order=order),
        FusedConv(weight=CONV.weight, bias=CONV.bias, groups=2, in_order=order[[0, 2, 1, 3]]),
        FusedConv(weight=CONV.weight, bias=CONV.bias, groups=2, stride=(2, 2)),
        FusedConv(weight=torch.ones(4, 4, 1, 1), bias=CONV.bias),
    ]
    assert len({signature(each, CALL) for each in (CONV, *others)}) == len(others) + 1
