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
        ({"format": "other"}, "not a report of strucspars bench"),
        ({"format_version": 99}, "format version 99, this program reads 1 and 2; measure again"),
        ({"rows": [{}]}, "damaged"),
        ({"rows": 3}, "damaged"),
        ({"more": 1}, r"damaged: BenchReport with .*'more'"),
        ({"missing": [{"name": "openvino"}]}, "damaged: MissingRuntime"),
    ],
)
def test_what_is_no_such_report_is_refused(report: BenchReport, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report_from_json(changed(report, **changes))


@pytest.mark.parametrize("lost", ["num_gathers", "error", "size"])
def test_a_row_without_one_of_its_entries_is_refused(report: BenchReport, lost: str) -> None:
    document = report.document()
    del document["rows"][1][lost]
    with pytest.raises(ValueError, match=rf"the report is damaged: .*{lost}.*; measure again"):
        report_from_json(json.dumps(document))


def test_a_report_of_the_first_version_is_still_read(report: BenchReport) -> None:
    document = report.document() | {"format_version": 1}
    for row in document["rows"]:
        row["size"] |= {"gathers": row.pop("num_gathers"), "gathered_bytes": row.pop("gathered_bytes")}
    assert report_from_json(json.dumps(document)).rows == report.rows
    assert report_from_json(json.dumps(document)).rows[1].num_gathers == 67


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"rows": NaN}'])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"bench\.json is not"):
        report_from_json(text, "bench.json")
