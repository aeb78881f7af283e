"""Outputs of any shape: compared where they can be, and never taken for equal where they cannot."""

import math
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

import strucspars as ss
from strucspars.convert.comparison import compare_outputs, relative_error, tolerance

CHANNELS = 16
IMAGES = torch.randn(2, CHANNELS, 6, 6, generator=torch.Generator().manual_seed(1))
ONES, TWOS = torch.ones(3), 2 * torch.ones(3)
SCORES = torch.tensor([[1.0, 2.0, -4.0], [0.5, 0.5, 0.0]])
INF, NAN = math.inf, math.nan

Pair = namedtuple("Pair", "first second")


@dataclass
class Masks:
    mask: Any
    name: str = "mask"


class Opaque:
    """An object of unknown parts."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask


# By name, in this module: given as they are, tracing would look inside them.
@fx.wrap
def packed(mask: torch.Tensor) -> Opaque:
    return Opaque(mask)


@fx.wrap
def counted(mask: torch.Tensor) -> int:
    return len(mask)


CONTAINERS: dict[str, Callable[[Any], object]] = {
    "dataclass": Masks,
    "dataclass in a list": lambda value: [Masks(value)],
    "container in a dataclass": lambda value: Masks({"deep": (value,)}),
    "dictionary": lambda value: {"mask": value},
    "ordered dictionary": lambda value: OrderedDict(mask=value),
    "other mapping": lambda value: UserDict(mask=value),
    "named tuple": lambda value: Pair(0, value),
    "pytree": lambda value: deque([value]),
}


def complaint(outputs: object, expected: object, *, whole_numbers: bool = True) -> str:
    return compare_outputs(outputs, expected, whole_numbers=whole_numbers).complaint


@pytest.mark.parametrize("container", CONTAINERS)
def test_tensors_in_containers_are_compared(container: str) -> None:
    build = CONTAINERS[container]
    assert complaint(build(ONES), build(ONES.clone())) == ""
    assert "off by 1" in complaint(build(TWOS), build(ONES))


@pytest.mark.parametrize("container", CONTAINERS)
def test_objects_in_containers_make_outputs_incomparable(container: str) -> None:
    outputs = (ONES, CONTAINERS[container](Opaque(ONES)))
    assert "object of Opaque" in complaint(outputs, outputs)


def test_outputs_without_tensors_cannot_be_compared() -> None:
    without: tuple[object, ...] = (None, 3, "text", [], {}, {"count": 3}, Masks(None), deque())
    for outputs in without:
        assert "no output is a tensor" in complaint(outputs, outputs)


@pytest.mark.parametrize(
    ("value", "other"), [(1, 2), (1.5, 2.5), (None, 0), ("a", "b"), (True, False), (1, True), (None, ONES), (ONES, 1.0)]
)
def test_values_that_are_no_tensors_must_be_the_same(value: object, other: object) -> None:
    assert complaint([ONES, value], [ONES, value]) == ""
    assert "output 1 is" in complaint([ONES, value], [ONES, other])


def test_values_that_are_the_same_add_no_error() -> None:
    assert compare_outputs((ONES, 3, "name"), (ONES, 3, "name")).relative_error == 0


@pytest.mark.parametrize("kind", [float, complex])
def test_fractions_outside_of_tensors_may_differ_by_rounding(kind: type[float] | type[complex]) -> None:
    assert complaint([ONES, kind(1e9 + 1)], [ONES, kind(1e9)]) == ""
    assert "output 1 is" in complaint([TWOS, kind(0.01)], [TWOS, kind(0.02)])
    assert complaint([ONES, kind(math.inf)], [ONES, kind(math.inf)]) == ""
    assert "output 1 is" in complaint([ONES, kind(math.inf)], [ONES, kind(1)])
    assert complaint([ONES, kind(math.nan)], [ONES, kind("nan")]) == ""


def test_truth_values_beside_fractions_are_no_measure_of_them() -> None:
    outputs = [torch.tensor([True]), ONES, 0.5]
    assert complaint(outputs, list(outputs)) == ""


def test_keys_and_shapes_must_be_the_same() -> None:
    expected = {"mask": ONES}
    assert complaint({"other": ONES}, expected) == "it returns output other instead of output mask"
    assert complaint({"mask": ONES, "other": ONES}, expected)
    assert complaint({}, expected) == "it returns nothing instead of output mask"
    assert complaint({"mask": ONES[:2]}, expected) == "output mask has shape (2,) instead of (3,)"


def test_the_first_output_that_differs_is_named_and_the_largest_error_told() -> None:
    compared = compare_outputs([ONES, {"a": 1.25 * ONES, "b": TWOS}], [ONES, {"a": ONES, "b": ONES}])
    assert compared.complaint == "output 1.a is off by 0.25 of its largest entry, 0.0001 is allowed"
    assert (compared.relative_error, compared.tolerance) == (1, 1e-4)
    assert compare_outputs([ONES, ONES.half()], [ONES, ONES.half()]).tolerance == tolerance(ONES.half())


def test_errors_are_relative_to_the_largest_entry() -> None:
    for scale in (1, 1e-6, -1):
        error = relative_error(scale * (SCORES + 0.004), scale * SCORES)
        assert error == pytest.approx(0.001, rel=1e-3)
    assert relative_error(SCORES, SCORES) == 0
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.full((3,), 1e-9), torch.zeros(3)) == math.inf
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
    assert relative_error(ONES[:2], ONES) == math.inf


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, NAN], [1.0, NAN], 0),
        ([1.0, INF], [1.0, INF], 0),
        ([1.0, -INF], [1.0, INF], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, INF], [1.0, 2.0], INF),
        ([NAN, NAN], [NAN, NAN], 0),
        ([0.0, 0.0], [NAN, NAN], INF),
    ],
)
def test_nan_and_infinity_must_be_in_the_same_places(found: list[float], expected: list[float], error: float) -> None:
    assert relative_error(torch.tensor(found), torch.tensor(expected)) == error


def test_complex_tensors_are_compared_up_to_rounding() -> None:
    expected = torch.complex(ONES, TWOS)
    for outputs, others in ((expected, expected), (expected.conj(), expected.conj().clone())):
        assert complaint(outputs + 1e-5, others) == ""
        assert "off by" in complaint(outputs + 1e-2j, others)
    assert relative_error(ONES, expected) == math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_few_roundings_are_allowed_in_every_precision_and_a_wrong_order_in_none(dtype: torch.dtype) -> None:
    expected = SCORES.to(dtype)
    allowed = tolerance(expected)
    assert 10 * torch.finfo(dtype).eps < allowed < 0.2
    assert complaint(expected + 4 * allowed / 2, expected) == ""
    assert "off by" in complaint(expected + 4 * allowed * 2, expected)


def test_whole_numbers_must_be_the_same_unless_they_are_left_out() -> None:
    numbers, others = torch.tensor([1, 2]), torch.tensor([1, 3])
    assert complaint(numbers, numbers.to(torch.int32)) == ""
    assert "off by inf" in complaint(numbers, others)
    assert "off by inf" in complaint(numbers.double(), numbers)
    assert complaint(numbers, others, whole_numbers=False) == ""
    assert "shape" in complaint(numbers, others[:1], whole_numbers=False)


class Network(nn.Module):
    """Computes something else when it is traced, if it is told to."""

    def __init__(self, pack: Callable[[torch.Tensor], object], *, lies: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        grouped = ss.ShuffledGroupConv2d(CHANNELS, CHANNELS, 3, groups=4)
        grouped.in_perm.copy_(torch.randperm(CHANNELS))
        self.net = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), grouped, nn.Conv2d(CHANNELS, 4, 1))
        self.pack, self.lies = pack, lies

    def forward(self, images: torch.Tensor) -> object:
        if self.lies and not isinstance(images, torch.Tensor):
            images = images / 255
        return self.pack(self.net(images))


def test_a_network_that_puts_out_a_dataclass_is_folded() -> None:
    model = Network(Masks, lies=False).eval()
    folded = ss.fold(model, IMAGES)
    assert str(ss.fold_report(folded)) == "no gathers remain"
    torch.testing.assert_close(folded(IMAGES).mask, model(IMAGES).mask.detach(), rtol=1e-4, atol=1e-5)


def test_a_wrong_graph_does_not_hide_in_a_dataclass() -> None:
    model = Network(Masks, lies=True).eval()
    folded = ss.fold(model, IMAGES)
    assert "off by" in ss.fold_report(folded).untraced_reason
    torch.testing.assert_close(folded(IMAGES).mask, model(IMAGES).mask)


@pytest.mark.parametrize("lies", [False, True])
def test_a_network_that_puts_out_an_opaque_object_stays_as_it_is(lies: bool) -> None:
    model = Network(lambda mask: packed(mask), lies=lies).eval()
    folded = ss.fold(model, IMAGES, widen_groups_below=8)
    report = ss.fold_report(folded)
    assert "an object of Opaque, which cannot be compared" in report.untraced_reason
    assert report.untraced_reason in str(report)
    torch.testing.assert_close(folded(IMAGES).mask, model(IMAGES).mask)


def test_a_network_that_puts_out_no_tensor_stays_as_it_is() -> None:
    folded = ss.fold(Network(lambda mask: counted(mask), lies=False), IMAGES)
    assert "no output is a tensor" in ss.fold_report(folded).untraced_reason
    assert folded(IMAGES) == len(IMAGES)
