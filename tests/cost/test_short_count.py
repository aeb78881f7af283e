"""Counts in few characters."""

import pytest

from strucspars.cost.text_table import short_count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1K"),
        (999_400, "999K"),
        (999_500, "1M"),
        (999_600, "1M"),
        (1_000_000, "1M"),
        (999_999_999, "1G"),
        (1_500_000_000_000, "1.5T"),
        (-2500, "-2.5K"),
    ],
)
def test_counts_have_three_digits_and_a_unit(count: int, text: str) -> None:
    assert short_count(count) == text
