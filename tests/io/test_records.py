"""Plain values become dataclasses, and what is wrong is named by its place in the file."""

import math
import pickle
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest

from strucspars.core.checks import IntArray
from strucspars.io.records import RecordError, as_record, check_header, convert, parse_json, parse_yaml, plain, to_json


@dataclass(frozen=True, kw_only=True)
class Layer:
    group_level: int
    order: IntArray = field(default_factory=lambda: np.arange(2))

    def __post_init__(self) -> None:
        if self.group_level < 1:
            raise ValueError(f"group_level must be a whole number from 1 on, got {self.group_level}")


@dataclass(frozen=True, kw_only=True)
class Document:
    name: str
    layers: Mapping[str, Layer]
    target: float | None = None
    form: Literal["masked", "32"] = "masked"
    shape: tuple[int, int] = (1, 1)
    names: tuple[str, ...] = ()
    is_last: bool = False
    rest: Mapping[str, Any] = field(default_factory=dict)


WHOLE: dict[str, Any] = {
    "name": "a",
    "layers": {"conv": {"group_level": 2, "order": [1, 0]}},
    "target": 1,
    "form": 32,
    "shape": [3, 4],
    "names": ["x"],
    "is_last": True,
    "rest": {"anything": [None]},
}


def test_a_record_has_the_types_of_its_dataclass() -> None:
    document = as_record(Document, WHOLE, "a.json")
    assert (document.target, type(document.target), document.form) == (1.0, float, "32")
    assert (document.shape, document.names, document.rest) == ((3, 4), ("x",), {"anything": [None]})
    assert document.layers["conv"].group_level == 2
    np.testing.assert_array_equal(document.layers["conv"].order, [1, 0], strict=True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"layers": {"conv": {"group_level": "x"}}}, "layers.conv.group_level: must be a whole number, got 'x'"),
        ({"layers": {"conv": {"group_level": True}}}, "layers.conv.group_level: must be a whole number, got True"),
        ({"layers": {"conv": {"group_level": 2**63}}}, "layers.conv.group_level: must be a whole number, got 9223"),
        ({"layers": {"conv": {"group_level": 0}}}, "layers.conv: group_level must be a whole number from 1 on, got 0"),
        ({"layers": {"conv": {}}}, "layers.conv.group_level: is missing"),
        ({"layers": {"conv": {"group_level": 1, "level": 1}}}, "layers.conv.level: is not known here; known are group"),
        ({"layers": {"conv": {"group_level": 1, "order": [0.5]}}}, "layers.conv.order: must be a list of whole num"),
        ({"layers": {"conv": {"group_level": 1, "order": [2**70]}}}, "layers.conv.order: must be a list of whole"),
        ({"layers": {"conv": 3}}, "layers.conv: must be an object, got 3"),
        ({"layers": []}, "layers: must be a mapping, got []"),
        ({"target": math.nan}, "target: must be a finite number or null, got nan"),
        ({"target": math.inf}, "target: must be a finite number or null, got inf"),
        ({"target": 10**400}, "target: must be a finite number or null, got 1000"),
        ({"target": "0.5"}, "target: must be a finite number or null, got '0.5'"),
        ({"form": "grouped"}, "form: must be one of masked, 32, got 'grouped'"),
        ({"shape": [1]}, "shape: must be a list of 2, got [1]"),
        ({"names": ["a", 3]}, "names[1]: must be text (numbers in quotes), got 3"),
        ({"names": "a"}, "names: must be a list, each text (numbers in quotes), got 'a'"),
        ({"is_last": 1}, "is_last: must be true or false, got 1"),
        ({"name": "a" * 10_000}, None),
        ({"is_last": "a" * 10_000}, "is_last: must be true or false, got 'aaa"),
    ],
)
def test_what_does_not_fit_is_named_by_its_place(change: dict[str, Any], complaint: str | None) -> None:
    if complaint is None:
        as_record(Document, WHOLE | change, "a.json")
        return
    with pytest.raises(RecordError, match=f"^a\\.json: {re.escape(complaint)}") as caught:
        as_record(Document, WHOLE | change, "a.json")
    assert len(str(caught.value)) < 300


def test_an_error_survives_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(RecordError("a.json", "b", "is missing")))
    assert str(error) == "a.json: b: is missing"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"a": NaN}',
        "[Infinity]",
        "__import__('os').abort()",
        b"\xff",
        "9" * 5000,
    ],
)
def test_what_is_no_json_is_named(text: str | bytes) -> None:
    with pytest.raises(RecordError, match=r"^a\.json: is not valid JSON: "):
        parse_json(text, "a.json")


def test_a_header_must_be_as_expected() -> None:
    document = {"format": "plan", "format_version": 1, "rest": 3}
    assert check_header(document, "a", format="plan", format_version=1) == {"rest": 3}
    for other in ({"format_version": True}, {"format_version": 2}, {"format": None}):
        with pytest.raises(RecordError, match=f"^a: {next(iter(other))}: must be .*; (give a file|upgrade strucspars)"):
            check_header(document | other, "a", format="plan", format_version=1)
    with pytest.raises(RecordError, match=r"^a: must be an object, got 3"):
        check_header(3, "a", format="plan")


def test_yaml_has_plain_values_aliases_and_merge_keys() -> None:
    text = "a: &a {x: 1, y: 1e-3}\nb: {<<: *a, x: 2}\nc: *a\n"
    assert parse_yaml(text, "a.yaml") == {
        "a": {"x": 1, "y": 0.001},
        "b": {"x": 2, "y": 0.001},
        "c": {"x": 1, "y": 0.001},
    }
    assert parse_yaml("", "a.yaml") is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: {b: 1, b: 2}", "a.b: is repeated in line 1"),
        ("a: 1\nb: 2\na: 3", "a: is repeated in line 3"),
        ("a: *b", "is not valid YAML"),
        ("a: [", "is not valid YAML"),
        ("PK\x03", "is not valid YAML"),
        ("[" * 2_000, "is not valid YAML"),
        ("? [a]\n: b", "is not valid YAML"),
        ("a: !!python/object/apply:os.abort []", "is not valid YAML"),
        ("a: 2024-99-99", "is not valid YAML"),
        ("a: &a [*a]", "a: its aliases amount to more than 100,000 values"),
    ],
)
def test_what_is_no_plain_yaml_is_named(text: str, complaint: str) -> None:
    with pytest.raises(RecordError, match=f"^a\\.yaml: {re.escape(complaint)}"):
        parse_yaml(text, "a.yaml")


@pytest.mark.parametrize("kind", ["[{}, {}, {}]", "{{<<: [{}, {}, {}]}}"])
def test_aliases_that_multiply_are_refused_at_once(kind: str) -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{place}: &a{place} {kind.format(*[f'*a{place - 1}'] * 3)}" for place in range(1, 40)]
    start = time.process_time()
    with pytest.raises(RecordError, match=r"its aliases amount to more than 100,000 values; write out what is meant"):
        parse_yaml("\n".join(lines), "a.yaml")
    # Without the bound it would take until the memory is full.
    assert time.process_time() - start < 5


def test_json_text_comes_back_with_null_for_what_it_cannot_hold() -> None:
    layer = Layer(group_level=2, order=[0, 1])  # type: ignore[arg-type]  # as read from a file
    assert parse_json(to_json({"a": layer, "b": math.nan, "c": (1,)}), "a") == {
        "a": {"group_level": 2, "order": [0, 1]},
        "b": None,
        "c": [1],
    }
    for value, complaint in (
        (np.int64(1), r"row\['a'\] is a numpy.int64, which JSON cannot hold"),
        ({3: 1}, "the key 3"),
    ):
        with pytest.raises(ValueError, match=complaint):
            plain({"a": value}, "row")


@pytest.mark.parametrize("value", [1e30, -1.7e308, 2**63, 5e-324])
def test_every_finite_number_is_one(value: float) -> None:
    assert convert(float, value, "a") == value


def test_a_type_that_stands_alone_is_converted_too() -> None:
    assert convert(list[float], [1], "a") == [1.0]
    with pytest.raises(RecordError, match=r"^a: \[0\]: must be a finite number"):
        convert(list[float], ["x"], "a")
