import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest

from strucspars.prune.channel_selection import ChannelSelection


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


def test_copies_and_other_processes_get_an_equal_selection() -> None:
    assert copy.deepcopy(selection()) == selection()
    assert pickle.loads(pickle.dumps(selection())) == selection()


def test_channels_are_counted() -> None:
    assert selection().kept_channels == 4
    assert selection().removed_channel_fraction == pytest.approx(1 / 3)


def test_of_no_channels_none_are_removed() -> None:
    assert ChannelSelection({}, {}).removed_channel_fraction == 0


def test_a_selection_equals_nothing_but_selections() -> None:
    assert selection() != selection().to_json()
    assert selection() != ChannelSelection({**selection().kept, "b": np.array([0])}, selection().widths)


def test_the_digest_is_that_of_the_channels_that_stay() -> None:
    digest = selection().digest()
    assert ChannelSelection.from_json(selection(threshold=0.25).to_json()).digest() == digest
    assert ChannelSelection({**selection().kept, "b": np.array([0])}, selection().widths).digest() != digest


def test_figures_are_floating_point_numbers() -> None:
    figures = selection(threshold=1, removed_param_fraction=0, removed_mac_fraction=1)
    assert '"threshold": 1.0, "removed_param_fraction": 0.0, "removed_mac_fraction": 1.0' in figures.to_json()


def test_a_selection_cannot_be_changed() -> None:
    given = np.array([0, 1])
    chosen = ChannelSelection({"a": given}, {"a": 3})
    given[0] = 2
    assert chosen.kept["a"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        chosen.kept["a"][0] = 1
    with pytest.raises(TypeError):
        chosen.kept["a"] = given  # type: ignore[index]  # the attempt is the point


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([], "'a': no channel is kept; keep at least one"),
        ([0, 4], r"'a': kept channels must lie in \[0, 4\), got 4"),
        ([-1, 2], r"must lie in \[0, 4\), got -1"),
        ([10**30], r"must lie in \[0, 4\)"),
        ([0.5], r"must lie in \[0, 4\), got 0.5"),
        ([True], "got True"),
        ([2, 1], "'a': kept channels must be ascending and differ"),
        ([1, 1], "ascending and differ"),
        ("01", "must be a list of whole numbers"),
        (3, "must be a list of whole numbers"),
    ],
)
def test_bad_channels_are_named(kept: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChannelSelection({"a": kept}, {"a": 4})
    text = selection().to_json()
    document = json.loads(text)
    document["norms"]["a"]["kept"] = kept
    with pytest.raises(ValueError, match=message):
        ChannelSelection.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "strucspars-plan"}, "not a channel selection"),
        ({"format_version": 2}, "format version 2.*upgrade strucspars"),
        ({"format_version": True}, "no usable 'format_version': True"),
        ({"more": 1}, "must be an object with .* got .*'more'"),
        ({"norms": []}, "'norms' must be an object, got list"),
        ({"norms": {"a": {"kept": [0]}}}, "batch norm 'a' must be an object with"),
        ({"norms": {"a": [0]}}, "batch norm 'a' must be an object with.*got list"),
        ({"norms": {"a": {"kept": [0], "width": 0}}}, "width of 'a' must be a whole number from 1 on, got 0"),
        ({"threshold": -1}, "threshold must be a number from 0 on, got -1"),
        ({"threshold": float("nan")}, "threshold must be a number from 0 on, got nan"),
        ({"threshold": float("inf")}, "threshold must be a number from 0 on, got inf"),
        ({"threshold": "0"}, "threshold must be a number from 0 on, got '0'"),
        ({"removed_param_fraction": 2}, r"removed_param_fraction must lie in \[0, 1\], got 2"),
        ({"removed_mac_fraction": "0"}, "removed_mac_fraction must lie in"),
    ],
)
def test_a_foreign_or_damaged_document_is_refused(change: dict[str, Any], message: str) -> None:
    document = json.loads(selection().to_json()) | change
    with pytest.raises(ValueError, match=message):
        ChannelSelection.from_json(json.dumps(document))


def test_channels_of_narrow_integers_are_checked_as_numbers() -> None:
    with pytest.raises(ValueError, match="ascending and differ"):
        ChannelSelection({"a": np.array([2, 1], dtype=np.uint8)}, {"a": 4})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, None])
def test_text_that_is_no_selection_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="channel selection"):
        ChannelSelection.from_json(text)


def test_kept_and_widths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"must name the same batch norms.*\['b'\]"):
        ChannelSelection({"a": np.array([0])}, {"a": 1, "b": 1})
    with pytest.raises(ValueError, match="must name the same batch norms"):
        ChannelSelection({1: np.array([0])}, {"a": 1})  # type: ignore[dict-item]  # the bad value is the point
    with pytest.raises(ValueError, match="must map names"):
        ChannelSelection([np.array([0])], {"a": 1})  # type: ignore[arg-type]  # the bad value is the point
    with pytest.raises(ValueError, match="must map names"):
        ChannelSelection({"a": np.array([0])}, [1])  # type: ignore[arg-type]  # the bad value is the point


def test_a_selection_of_another_network_is_named() -> None:
    selection().check_matches({"a": 4, "b": 2})
    with pytest.raises(ValueError, match=r"lacks \['c'\] and has \[\] besides"):
        selection().check_matches({"a": 4, "b": 2, "c": 2})
    with pytest.raises(ValueError, match=r"lacks \[\] and has \['b'\] besides"):
        selection().check_matches({"a": 4})
    with pytest.raises(ValueError, match="'b' has 8 channels, but the selection was made for 2"):
        selection().check_matches({"a": 4, "b": 8})
    with pytest.raises(ValueError, match="'b' has 1 channels, but the selection was made for 2"):
        selection().check_matches({"a": 4, "b": 1})


@pytest.mark.parametrize("version", [0, -1, 1.0, "1", None])
def test_a_version_that_never_was_is_refused(version: object) -> None:

    document = json.loads(selection().to_json()) | {"format_version": version}
    with pytest.raises(ValueError, match="no usable 'format_version'"):
        ChannelSelection.from_json(json.dumps(document))
