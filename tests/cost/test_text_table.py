import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strucspars.cost.text_table import Column, markdown_table, shortened, text_table


@given(st.text(max_size=60), st.integers(3, 60))
@example(".00000", 5)  # has a dot where its own dots end
def test_a_shortened_text_fits_and_keeps_its_ends(text: str, width: int) -> None:
    short = shortened(text, width)
    assert len(short) == min(len(text), width)
    if len(text) > width:
        kept = width - len("...")
        head, dots, tail = short[: kept // 2], short[kept // 2 : kept // 2 + 3], short[kept // 2 + 3 :]
        assert text.startswith(head)
        assert dots == "..."
        assert text.endswith(tail)


@pytest.mark.parametrize("width", [80, 40])
def test_a_wide_table_shortens_texts_only(width: int) -> None:
    names = Column("layer", [f"{'block.' * 20}conv{place}" for place in range(3)], is_text=True)
    numbers = Column("params", ["1,000,000", "2", "3"])
    lines = text_table([names, numbers], width).splitlines()
    assert {len(line) for line in lines} == {width}
    assert [line.split()[-1] for line in lines[2:]] == ["1,000,000", "2", "3"]
    assert all("..." in line and f"conv{place}" in line for place, line in enumerate(lines[2:]))


def test_no_number_is_cut_where_the_table_cannot_fit() -> None:
    table = text_table([Column("layer", ["a" * 30], is_text=True), Column("params", ["1" * 30])], 20)
    assert "1" * 30 in table
    assert "aaaa...aaaaa" in table


def test_a_table_of_numbers_alone_keeps_its_columns_where_it_cannot_fit() -> None:
    table = text_table([Column("params", ["1" * 30, "2"]), Column("MACs", ["3" * 30, "4"])], 20)
    assert {len(line) for line in table.splitlines()} == {30 + 2 + 30}


def test_the_widest_text_gives_way_first() -> None:
    columns = [Column("layer", ["n" * 60], is_text=True), Column("type", ["ShuffledGroupConv2d"], is_text=True)]
    assert "ShuffledGroupConv2d" in text_table(columns, 50)


def test_empty_columns_are_left_out() -> None:
    assert "MACs" not in text_table([Column("layer", ["conv"], is_text=True), Column("MACs", [""])])


def test_empty_columns_are_left_out_of_markdown_too() -> None:
    columns = [Column("layer", ["conv", ""], is_text=True), Column("MACs", ["", ""])]
    assert markdown_table(columns).splitlines() == ["| layer |", "| --- |", "| conv |", "|  |"]


def test_a_table_is_at_most_120_columns_wide_by_itself() -> None:
    columns = [Column("layer", ["n" * 200], is_text=True), Column("params", ["64"])]
    assert {len(line) for line in text_table(columns).splitlines()} == {120}
