"""What exporters say is kept back while they work, and only then; of their errors the first line is told."""

import logging

import pytest

from strucspars.export.quiet import first_line, without_chatter


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO])
def test_logs_are_heard_after_an_exporter_as_they_were_before(level: int) -> None:
    logging.disable(level)
    try:
        with without_chatter():
            assert logging.root.manager.disable == logging.ERROR
        assert logging.root.manager.disable == level
        with pytest.raises(KeyError), without_chatter():
            raise KeyError
        assert logging.root.manager.disable == level
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("\x1b[31mbad shape\x1b[0m", "bad shape"),
        ("\n  \n  bad shape.\nin a node", "bad shape"),
        ("Error:", "Error"),
        ("", "RuntimeError"),
        (" \n", "RuntimeError"),
    ],
)
def test_the_first_line_of_an_error_stands_inside_a_sentence(message: str, line: str) -> None:
    assert first_line(RuntimeError(message)) == line
