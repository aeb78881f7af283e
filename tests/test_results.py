"""Published numbers are generated from the measurements, never typed."""

import json
from pathlib import Path

from permutations import markdown, summary_table

ROOT = Path(__file__).parent.parent
REPORT = json.loads((ROOT / "results" / "permutations.json").read_text())


def test_the_page_of_the_solvers_results_is_that_of_its_json() -> None:
    assert (ROOT / "results" / "permutations.md").read_text() == markdown(REPORT)


def test_the_readme_shows_the_solvers_measured_numbers() -> None:
    assert summary_table(REPORT) in (ROOT / "README.md").read_text()


def test_the_measured_solver_meets_its_goals() -> None:
    iid = REPORT["kinds"]["iid"]
    assert iid["cold"]["speedup"] >= 40
    assert iid["cold"]["gain_ratio"] >= 1.15
    for situations in REPORT["kinds"].values():
        assert situations["cold"]["mean_cost_ratio"] <= 1
        assert situations["refresh"]["speedup"] >= 50
        assert situations["refresh"]["mean_cost_ratio"] <= 1
    assert set(REPORT["planted_512x512x3x3_recovered"].values()) == {"5 of 5"}
    assert REPORT["peak_megabytes_2048x1024"] < 250
