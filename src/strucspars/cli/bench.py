"""`strucspars bench`: how much faster compressed networks are, in stock runtimes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from strucspars.cli.console import (
    Classes,
    Debug,
    Force,
    ImageShapeOption,
    Json,
    MinChannelsPerGroup,
    Output,
    Quiet,
    WidenGroupsBelow,
    check_can_be_written,
    complete_model,
    examples,
    from_home,
    parse_image_shape,
)
from strucspars.cli.errors import RunFailed

if TYPE_CHECKING:
    from strucspars.bench.suite import BenchSettings, OnProgress, Subject

OTHER_RATES = (0.5,)
FULL_BATCHES = (1, 16)
# Besides ResNet-50: the paper's other networks, in the runtimes of deployment.
FULL_NETWORKS = ("resnet101", "densenet201")
FULL_NETWORKS_RUNTIMES = ("onnxruntime", "openvino")
EXAMPLES = examples(
    "strucspars bench",
    "strucspars bench --full --out bench.json",
    "strucspars bench runs/demo --batch 1,16 --threads 1,all",
    "strucspars bench timm:mobilenetv3_small_100 --rates 0.3 --runtimes onnxruntime --min-channels-per-group 16",
)

Value = TypeVar("Value")


def bench(
    context: typer.Context,
    network: Annotated[
        str,
        typer.Argument(
            metavar="NETWORK", help="A network by name, or the folder of a finished run.", autocompletion=complete_model
        ),
    ] = "resnet50",
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="0.35,0.65",
            help="Fractions of the convolutions' weights to remove; compress --target counts all parameters.",
            show_default="the paper's for resnet50, resnet101 and densenet201, else 0.5",
        ),
    ] = None,
    runtimes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Of onnxruntime, pytorch, torch-compile, openvino.",
            show_default="onnxruntime,pytorch,openvino; with --full all",
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="1,16", help="Images at a time.", show_default="1; with --full 1,16")
    ] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="1,all", help="Threads of a runtime.", show_default="1; with --full 1,all")
    ] = None,
    min_channels_per_group: MinChannelsPerGroup = 1,
    widen_groups_below: WidenGroupsBelow = None,
    seconds: Annotated[float, typer.Option(help="Timing of each network at each batch and number of threads.")] = 90.0,
    model: Annotated[str | None, typer.Option(help="For a run whose network is a function: its name again.")] = None,
    classes: Classes = None,
    image_shape: ImageShapeOption = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="More batches, threads and runtimes; resnet101 and densenet201 too. Takes long."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A JSON file to write as well.", callback=from_home)] = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time a network dense and compressed, on this machine's processor, and print the paper's Table 4 beside it.

    A network by name gets random weights and channel orders: its speed does not depend on training. Nothing is timed
    before its outputs are those of PyTorch. Do not use the machine for anything else meanwhile.
    """
    from functools import partial

    from strucspars.bench.networks import PAPER_GROUPS
    from strucspars.bench.results import report_text
    from strucspars.bench.suite import BenchSettings
    from strucspars.bench.suite import bench as run_bench
    from strucspars.bench.timing import TimingRules
    from strucspars.cli.networks import refuse_ignored
    from strucspars.io.files import followed, write_text
    from strucspars.paper.published import PAPER_TIMES

    output = Output(as_json=as_json, quiet=quiet)
    settings = _settings(runtimes, batch, threads, widen_groups_below, full=full)
    if Path(network).expanduser().is_dir():
        ignored = {
            "--rates": rates,
            "--classes": classes,
            "--image-shape": image_shape,
            "--min-channels-per-group": None if min_channels_per_group == 1 else min_channels_per_group,
        }
        refuse_ignored(f"the run in {network} has its own", ignored)
        subjects = [_subject_of_run(network, model, settings)]
    else:
        _refuse_path(network, model)
        subject = partial(
            _subject_of_name, classes=classes, shape=parse_image_shape(image_shape), width=min_channels_per_group
        )
        subjects = [subject(network, _rates(network, rates), settings)]
        kept = tuple(name for name in FULL_NETWORKS_RUNTIMES if name in settings.runtimes)
        if full and kept and network == PAPER_TIMES.network:
            others = BenchSettings(runtimes=kept, widen_groups_below=widen_groups_below)
            subjects += [subject(name, tuple(PAPER_GROUPS[name]), others) for name in FULL_NETWORKS]
    rules = TimingRules(seconds=seconds)
    if out is not None:
        check_can_be_written(out, force=force)
    with _shown_progress(output) as on_progress:
        report = run_bench(subjects, command=_command(context), rules=rules, on_progress=on_progress)
    if out is not None:
        write_text(followed(out), report.to_json())
    output.outcome(report_text(report, PAPER_TIMES), report.document())
    errors = [row.error for row in report.rows if row.error]
    if errors:
        raise RunFailed(f"{len(errors)} of {len(report.rows)} programs were not timed; the first: {errors[0]}")


def _refuse_path(network: str, model: str | None) -> None:
    """Refuse what is no folder and cannot be the name of a network."""
    from strucspars.cli.networks import refuse_ignored

    is_file = Path(network).expanduser().is_file()
    if is_file or ("/" in network and ":" not in network):
        what = f"{network} is a file" if is_file else f"there is no folder {network}"
        raise ValueError(f"{what}; bench takes the folder of a finished run, or a network by name")
    refuse_ignored(f"it is for runs, and there is no folder {network!r}", {"--model": model})


def _subject_of_name(
    name: str,
    rates: tuple[float, ...],
    settings: BenchSettings,
    *,
    classes: int | None,
    shape: tuple[int, int, int] | None,
    width: int,
) -> Subject:
    from functools import partial

    from strucspars.bench.networks import random_networks
    from strucspars.bench.suite import Subject
    from strucspars.cli.networks import usual_classes, usual_image_shape

    shape = shape or usual_image_shape(name)
    options: dict[str, Any] = {"num_classes": classes or usual_classes(name), "min_channels_per_group": width}
    networks = partial(random_networks, name, rates, image_shape=shape, **options)
    return Subject(name=name, image_shape=shape, networks=networks, settings=settings)


def _subject_of_run(network: str, model: str | None, settings: BenchSettings) -> Subject:
    from strucspars.bench.networks import networks_of_run
    from strucspars.bench.suite import Subject
    from strucspars.cli.networks import dense_network, run_with_network, saved_image_shape, saved_network

    folder, recipe = run_with_network(Path(network).expanduser(), named=model)
    shape = saved_image_shape(folder, recipe)
    return Subject(
        name=folder.path.resolve().name,
        image_shape=shape,
        networks=lambda: networks_of_run(dense_network(folder, recipe), saved_network(folder, recipe).eval(), shape),
        settings=settings,
    )


def _settings(
    runtimes: str | None, batches: str | None, threads: str | None, widen_groups_below: int | None, *, full: bool
) -> BenchSettings:
    from strucspars.bench.runtimes import RUNTIMES
    from strucspars.bench.suite import DEFAULT_RUNTIMES, BenchSettings
    from strucspars.core.checks import checked_at_least

    cores = os.cpu_count() or 1

    def counts(option: str, text: str | None, example: str) -> tuple[int, ...]:
        listed = _listed(
            option, text, lambda part: cores if (option, part) == ("--threads", "all") else int(part), example
        )
        return tuple(checked_at_least(option, value, 1) for value in listed)

    all_threads = tuple(dict.fromkeys((1, cores)))
    return BenchSettings(
        runtimes=_listed("--runtimes", runtimes, str, "onnxruntime,pytorch")
        or (tuple(RUNTIMES) if full else DEFAULT_RUNTIMES),
        batches=counts("--batch", batches, "1,16") or (FULL_BATCHES if full else (1,)),
        threads=counts("--threads", threads, "1,all") or (all_threads if full else (1,)),
        widen_groups_below=widen_groups_below,
    )


def _rates(network: str, text: str | None) -> tuple[float, ...]:
    from strucspars.bench.networks import PAPER_GROUPS

    rates = _listed("--rates", text, float, "0.35,0.65") or tuple(PAPER_GROUPS.get(network, OTHER_RATES))
    for rate in rates:
        if rate == 0:
            raise ValueError("--rates: a rate of 0 is the dense network, which is always there; leave it out")
        if not 0 < rate < 1:
            raise ValueError(f"--rates: a rate is a removed fraction and must lie between 0 and 1, got {rate:g}")
    return rates


def _listed(option: str, text: str | None, parse: Callable[[str], Value], example: str) -> tuple[Value, ...]:
    """The values of a list with commas, each once."""
    if text is None:
        return ()
    try:
        return tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
    except ValueError as error:
        raise ValueError(f"{option} must be values with commas between, such as {example}; got {text!r}") from error


def _command(context: typer.Context) -> str:
    """The command that measures the same again. Of a path elsewhere only the name: reports are published."""
    words = ["strucspars", "bench"]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.name == "network":
            path = Path(str(value))
            words.append(path.name if path.is_absolute() or ".." in path.parts else str(value))
        elif option.name in ("out", "force", "quiet", "as_json", "debug") or value in (None, False, option.default):
            continue
        else:
            words.append(option.opts[0])
            if value is not True:
                words.append(f"{value:g}" if option.name == "seconds" else str(value))
    return shlex.join(words)


@contextmanager
def _shown_progress(output: Output) -> Iterator[OnProgress]:
    """A bar that moves, on a terminal only."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if output.is_quiet or not output.console.is_interactive:
        yield lambda words, done: None
        return
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=output.console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda words, done: progress.update(task, description=words, completed=done)
