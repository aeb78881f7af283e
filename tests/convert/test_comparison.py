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
from strucspars.convert.comparison import difference

CHANNELS = 16
IMAGES = torch.randn(2, CHANNELS, 6, 6, generator=torch.Generator().manual_seed(1))
ONES, TWOS = torch.ones(3), 2 * torch.ones(3)

Pair = namedtuple("Pair", "first second")


@dataclass
class Masks:
    mask: Any
    name: str = "mask"


class Opaque:
    """An object that nobody can look into."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask


# By name, in this module: given as they are, tracing would look inside of them.
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


@pytest.mark.parametrize("container", CONTAINERS)
def test_tensors_in_containers_are_compared(container: str) -> None:
    build = CONTAINERS[container]
    assert difference(build(ONES), build(ONES.clone())) == ""
    assert "off by 1" in difference(build(TWOS), build(ONES))


@pytest.mark.parametrize("container", CONTAINERS)
def test_objects_in_containers_make_outputs_incomparable(container: str) -> None:
    outputs = (ONES, CONTAINERS[container](Opaque(ONES)))
    assert "object of Opaque" in difference(outputs, outputs)


def test_outputs_without_tensors_cannot_be_compared() -> None:
    without: tuple[object, ...] = (None, 3, "text", [], {}, {"count": 3}, Masks(None), deque())
    for outputs in without:
        assert "no tensor" in difference(outputs, outputs)


@pytest.mark.parametrize(
    ("value", "other"), [(1, 2), (1.5, 2.5), (None, 0), ("a", "b"), (True, False), (1, True), (None, ONES), (ONES, 1.0)]
)
def test_values_that_are_no_tensors_must_be_the_same(value: object, other: object) -> None:
    assert difference([ONES, value], [ONES, value]) == ""
    assert "puts out" in difference([ONES, value], [ONES, other])


@pytest.mark.parametrize("kind", [float, complex])
def test_fractions_outside_of_tensors_may_differ_by_rounding(kind: type[float] | type[complex]) -> None:
    # A mean of outputs that reach 2 is rounded as they are, however small it is.
    assert difference([TWOS, kind(1e-9)], [TWOS, kind(5e-9)]) == ""
    assert difference([ONES, kind(1e9 + 1)], [ONES, kind(1e9)]) == ""
    assert "puts out" in difference([TWOS, kind(0.01)], [TWOS, kind(0.02)])
    assert difference([ONES, kind(math.inf)], [ONES, kind(math.inf)]) == ""
    assert "puts out" in difference([ONES, kind(math.inf)], [ONES, kind(1)])


@pytest.mark.parametrize("with_whole_numbers", [True, False])
def test_complex_tensors_are_compared_up_to_rounding(with_whole_numbers: bool) -> None:
    expected = torch.complex(ONES, TWOS)
    for outputs, others in ((expected, expected), (expected.conj(), expected.conj().clone())):
        assert difference(outputs + 1e-5, others, with_whole_numbers=with_whole_numbers) == ""
        assert "off by" in difference(outputs + 1e-2j, others, with_whole_numbers=with_whole_numbers)
    assert "other tensors" in difference(ONES, expected)


def test_truth_values_beside_fractions_are_no_measure_of_them() -> None:
    outputs = [torch.tensor([True]), ONES, 0.5]
    assert difference(outputs, list(outputs), with_whole_numbers=True) == ""


def test_not_a_number_is_the_same_as_itself() -> None:
    assert difference([ONES, math.nan], [ONES, float("nan")]) == ""


def test_keys_and_shapes_must_be_the_same() -> None:
    for outputs in ({"other": ONES}, {"mask": ONES, "other": ONES}, {}, {"mask": ONES[:2]}):
        assert "other tensors" in difference(outputs, {"mask": ONES})


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.float16, 0.1), (torch.bfloat16, 0.1)],
)
def test_rounding_is_measured_against_the_largest_entry(dtype: torch.dtype, allowed: float) -> None:
    expected = torch.tensor([[1.0, 2.0, -4.0], [0.5, 0.5, 0.0]], dtype=dtype)
    assert difference(expected + 4 * allowed / 2, expected) == ""
    assert "off by" in difference(expected + 4 * allowed * 2, expected)


def test_outputs_below_zero_are_as_large_as_those_above() -> None:
    expected = torch.tensor([-1.0, -5.0])
    assert difference(expected + 1e-5, expected) == ""
    assert "where outputs reach 5" in difference(expected + 1, expected)


def test_nan_and_infinity_must_be_in_the_same_places() -> None:
    expected = torch.tensor([1.0, math.nan, math.inf])
    assert difference(expected.clone(), expected) == ""
    assert difference(torch.tensor([math.nan, 1.0, math.inf]), expected)
    assert difference(torch.tensor([1.0, math.nan, -math.inf]), expected)
    assert difference(torch.zeros(2), torch.full((2,), math.nan))


def test_every_tensor_of_a_list_is_compared() -> None:
    assert "off by 1" in difference([ONES, ONES, TWOS], [ONES, ONES, ONES])
    assert "other tensors" in difference([ONES], [ONES, ONES])


def test_whole_numbers_are_compared_where_asked() -> None:
    numbers, others = torch.tensor([1, 2]), torch.tensor([1, 3])
    assert difference(numbers, others) == ""
    assert "other whole numbers" in difference(numbers, others, with_whole_numbers=True)
    assert difference(numbers, numbers.clone(), with_whole_numbers=True) == ""


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
    assert "an object of Opaque, by which its graph cannot be compared" in report.untraced_reason
    assert report.untraced_reason in str(report)
    torch.testing.assert_close(folded(IMAGES).mask, model(IMAGES).mask)


def test_a_network_that_puts_out_no_tensor_stays_as_it_is() -> None:
    folded = ss.fold(Network(lambda mask: counted(mask), lies=False), IMAGES)
    assert "no tensor" in ss.fold_report(folded).untraced_reason
    assert folded(IMAGES) == len(IMAGES)
