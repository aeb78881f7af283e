"""The program: its commands, and the exit status of their errors."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from strucspars._version import __version__
from strucspars.cli import bench, compress, demo, evaluate, export, reproduce, run, summary, sweep
from strucspars.cli.console import examples, is_first_process
from strucspars.cli.errors import reported

EXAMPLES = examples(
    "strucspars demo",
    "strucspars run cifar10-resnet20-40 data.root=~/cifar10",
    "strucspars summary runs/cifar10-resnet20-40",
    "strucspars COMMAND --help",
)
app = typer.Typer(
    name="strucspars", add_completion=True, pretty_exceptions_enable=False, context_settings={"max_content_width": 120}
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"strucspars {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=EXAMPLES)
def strucspars(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Turn CNNs into group convolutions with learned channel shuffles."""
    if context.invoked_subcommand is None:
        print(context.get_help())


for name, command, epilogue in (
    ("demo", demo.demo, demo.EXAMPLES),
    ("run", run.run, run.EXAMPLES),
    ("compress", compress.compress, compress.EXAMPLES),
    ("eval", evaluate.evaluate, evaluate.EXAMPLES),
    ("summary", summary.summary, summary.SUMMARY_EXAMPLES),
    ("export", export.export, export.EXAMPLES),
    ("bench", bench.bench, bench.EXAMPLES),
    ("sweep", sweep.sweep, sweep.EXAMPLES),
    ("report", summary.report, summary.REPORT_EXAMPLES),
    ("reproduce", reproduce.reproduce, reproduce.EXAMPLES),
):
    app.command(name, epilog=epilogue)(command)


class _Lines(logging.Handler):
    """Writes to the present standard error: rich replaces it to show lines above its progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_first_process():
            print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr, flush=True)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show the library's warnings, one line each."""
    logger = logging.getLogger("strucspars")
    handler = _Lines(logging.WARNING)
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 0, 1 for a failed run, 2 for wrong use, 128 + n for signal n."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with warnings_as_lines():
            status = app(list(arguments), prog_name="strucspars", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        return reported(error, arguments)
    return status if isinstance(status, int) else 0
