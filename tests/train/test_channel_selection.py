import json
from typing import Any

import numpy as np
import pytest

from strucspars.train.slimming import ChannelSelection


def selection(**figures: float) -> ChannelSelection:
    return ChannelSelection({"a": np.array([0, 2, 3]), "b": np.array([1])}, {"a": 4, "b": 2}, **figures)


def test_json_gives_back_the_same_selection() -> None:
    whole = selection(threshold=0.25, removed_param_fraction=0.5, removed_mac_fraction=0.125)
    restored = ChannelSelection.from_json(whole.to_json())
    assert restored == whole
    assert restored != selection()
    assert list(restored.kept) == ["a", "b"]
    assert restored.kept["a"].dtype == np.int64
    assert restored.removed_mac_fraction == 0.125


def test_channels_are_counted() -> None:
    assert selection().kept_channels == 4
    assert selection().removed_channel_fraction == pytest.approx(1 / 3)


def test_of_no_channels_none_are_removed() -> None:
    assert ChannelSelection({}, {}).removed_channel_fraction == 0


def test_a_selection_equals_nothing_but_selections() -> None:
    assert selection() != selection().to_json()
    assert selection() != ChannelSelection({**selection().kept, "b": np.array([0])}, selection().widths)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([], "a list of whole numbers, one at least"),
        ([0.5], "a list of whole numbers"),
        ([True], "a list of whole numbers"),
        ([10**30], "a list of whole numbers"),
        ("01", "a list of whole numbers"),
        (3, "a list of whole numbers"),
        ([0, 4], r"'a': kept channels must ascend in \[0, 4\), got \[0, 4\]"),
        ([-1, 2], r"must ascend in \[0, 4\), got \[-1, 2\]"),
        ([2, 1], "must ascend in"),
        ([1, 1], "must ascend in"),
    ],
)
def test_bad_channels_are_named(kept: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChannelSelection({"a": kept}, {"a": 4})
    document = json.loads(selection().to_json())
    document["norms"]["a"]["kept"] = kept
    with pytest.raises(ValueError, match=message):
        ChannelSelection.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "strucspars-plan"}, "format: must be 'strucspars-channel-selection', got 'strucspars-plan'"),
        ({"format_version": 2}, "format_version: must be 1, got 2; upgrade strucspars"),
        ({"format_version": True}, "format_version: must be 1, got True"),
        ({"format_version": 0}, "format_version: must be 1, got 0"),
        ({"more": 1}, "more: is not known here"),
        ({"norms": []}, "norms: must be a mapping, got"),
        ({"norms": {"a": {"kept": [0]}}}, r"norms\.a\.width: is missing"),
        ({"norms": {"a": [0]}}, r"norms\.a: must be an object, got \[0\]"),
        ({"norms": {"a": {"kept": [0], "width": 0}}}, "width of 'a' must be a whole number from 1 on, got 0"),
        ({"threshold": float("inf")}, "is not valid JSON: Infinity is not a number"),
        ({"threshold": "0"}, "threshold: must be a finite number or null, got '0'"),
    ],
)
def test_a_foreign_or_damaged_document_is_refused(change: dict[str, Any], message: str) -> None:
    document = json.loads(selection().to_json()) | change
    with pytest.raises(ValueError, match=f"^selection.json: {message}"):
        ChannelSelection.from_json(json.dumps(document), "selection.json")


def test_channels_of_narrow_integers_are_checked_as_numbers() -> None:
    with pytest.raises(ValueError, match="must ascend in"):
        ChannelSelection({"a": np.array([2, 1], dtype=np.uint8)}, {"a": 4})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, None])
def test_text_that_is_no_selection_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="channel selection"):
        ChannelSelection.from_json(text)


def test_kept_and_widths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"must name the same batch norms.*\['b'\]"):
        ChannelSelection({"a": np.array([0])}, {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("widths", "found"),
    [
        ({"a": 4, "b": 2, "c": 2}, "'c' has 2 channels, but the selection was made for none"),
        ({"a": 4}, "'b' has no channels, but the selection was made for 2"),
        ({"a": 4, "b": 8}, "'b' has 8 channels, but the selection was made for 2"),
    ],
)
def test_a_selection_of_another_network_is_named(widths: dict[str, int], found: str) -> None:
    selection().check_matches({"a": 4, "b": 2})
    with pytest.raises(ValueError, match=f"another network: batch norm {found}; build the network"):
        selection().check_matches(widths)
