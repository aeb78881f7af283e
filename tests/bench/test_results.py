"""Reports as JSON."""

import json
from typing import Any

import pytest

from strucspars.bench.results import BenchReport, report_from_json


def test_a_report_survives_its_json(report: BenchReport) -> None:
    assert report_from_json(report.to_json()) == report


def test_the_json_says_all_that_a_number_needs(report: BenchReport) -> None:
    document = json.loads(report.to_json())
    assert {"command", "commit", "hardware", "versions", "settings", "rows", "missing"} <= set(document)
    assert document["rows"][1]["timing"]["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert document["rows"][2]["form"] == "bound"
    assert document["rows"][3]["timing"] is None
    assert document["rows"][3]["error"] == "not timed: wrong"


def changed(report: BenchReport, **changes: Any) -> str:
    return json.dumps(report.document() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "format: must be 'strucspars-bench', got 'other'"),
        ({"format_version": 2}, "format_version: must be 3, got 2"),
        ({"rows": [{}]}, r"rows\[0\]\.network: is missing"),
        ({"rows": 3}, "rows: must be"),
        ({"more": 1}, "more: is not known here"),
        ({"missing": [{"name": "openvino"}]}, r"missing\[0\]\.title: is missing"),
    ],
)
def test_what_is_no_such_report_is_refused(report: BenchReport, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"bench.json: {message}"):
        report_from_json(changed(report, **changes), "bench.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"rows": NaN}'])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^bench\.json: "):
        report_from_json(text, "bench.json")
