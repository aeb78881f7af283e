"""`strucspars bench`: how much faster compressed networks are, in stock runtimes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from strucspars.cli import console
from strucspars.train.observer import RunFailed

if TYPE_CHECKING:
    from strucspars.bench.suite import OnProgress, Subject

OTHER_RATES = (0.5,)
# Besides ResNet-50: the paper's other networks, in the runtimes of deployment.
FULL_NETWORKS = ("resnet101", "densenet201")
FULL_NETWORKS_RUNTIMES = ("onnxruntime", "openvino")
EXAMPLES = console.examples(
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
            metavar="NETWORK",
            help="A network by name, the folder of a finished run, or a checkpoint with --model.",
            autocompletion=console.complete_model,
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
    min_channels_per_group: console.MinChannelsPerGroup = 1,
    widen_groups_below: console.WidenGroupsBelow = None,
    seconds: Annotated[float, typer.Option(help="Timing of each network at each batch and number of threads.")] = 90.0,
    model: console.Model = None,
    classes: console.Classes = None,
    image_shape: console.ImageShapeOption = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="More batches, threads and runtimes; resnet101 and densenet201 too. Takes long."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A JSON file to write as well.", callback=console.from_home)] = None,
    force: console.Force = False,
    quiet: console.Quiet = False,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Time a network dense and compressed, on this machine's processor, and print the paper's Table 4 beside it.

    A network by name gets random weights and channel orders: its speed does not depend on training. Nothing is timed
    before its outputs are those of PyTorch. Do not use the machine for anything else meanwhile.
    """
    from dataclasses import replace

    from strucspars.bench.results import report_text
    from strucspars.bench.runtimes import RUNTIMES
    from strucspars.bench.suite import DEFAULT_RUNTIMES, TimingRules
    from strucspars.bench.suite import bench as run_bench
    from strucspars.io.files import followed, write_text
    from strucspars.paper.published import PAPER_TIMES

    output = console.Output(as_json=as_json, quiet=quiet)
    if full:
        runtimes, batch, threads = runtimes or ",".join(RUNTIMES), batch or "1,16", threads or "1,all"
    wanted_rates = _listed("--rates", rates, _rate, "fractions between 0 and 1, such as 0.35,0.65")
    subject = replace(
        _subject(network, wanted_rates, min_channels_per_group, model, classes, image_shape),
        runtimes=_listed("--runtimes", runtimes, str, "names") or DEFAULT_RUNTIMES,
        batches=_listed("--batch", batch, _count, "whole numbers from 1 on, such as 1,16") or (1,),
        threads=_listed("--threads", threads, _threads, "whole numbers from 1 on or all, such as 1,all") or (1,),
        widen_groups_below=widen_groups_below,
    )
    subjects = [subject]
    kept = tuple(name for name in FULL_NETWORKS_RUNTIMES if name in subject.runtimes)
    if full and kept and network == PAPER_TIMES.network:
        for name in FULL_NETWORKS:
            other = _subject(name, (), min_channels_per_group, None, classes, image_shape)
            subjects.append(replace(other, runtimes=kept, widen_groups_below=widen_groups_below))
    rules = TimingRules(seconds=seconds)
    if out is not None:
        console.check_can_be_written(out, force=force)
    with _shown_progress(output) as on_progress:
        report = run_bench(subjects, command=_command(context), rules=rules, on_progress=on_progress)
    if out is not None:
        write_text(followed(out), report.to_json())
    output.outcome(report_text(report, PAPER_TIMES), report.document())
    errors = [row.error for row in report.rows if row.error]
    if errors:
        raise RunFailed(f"{len(errors)} of {len(report.rows)} programs were not timed; the first: {errors[0]}")


def _subject(
    network: str,
    rates: tuple[float, ...],
    min_channels_per_group: int,
    model: str | None,
    classes: int | None,
    image_shape: str | None,
) -> Subject:
    """The network to time, in its default runtimes; one with weights of its own is timed beside its dense form."""
    from functools import partial

    from strucspars.bench.networks import PAPER_GROUPS, networks_of_run, random_networks
    from strucspars.bench.suite import Subject
    from strucspars.cli.networks import find_target, refuse_ignored

    shape = console.parse_image_shape(image_shape)
    found = find_target(network, model=model, classes=classes, image_shape=shape)
    if found.weights is None:
        build = partial(
            random_networks,
            found.name,
            rates or tuple(PAPER_GROUPS.get(found.name, OTHER_RATES)),
            image_shape=found.image_shape,
            num_classes=found.num_classes or 1,
            min_channels_per_group=min_channels_per_group,
        )
        return Subject(network=network, image_shape=found.image_shape, build=build)
    width = None if min_channels_per_group == 1 else min_channels_per_group
    ignored = {"--rates": rates or None, "--min-channels-per-group": width}
    refuse_ignored(f"the network in {network} has its own", ignored)
    return Subject(
        network=Path(network).expanduser().resolve().name,
        image_shape=found.image_shape,
        build=lambda: networks_of_run(found.dense(), found.network().eval(), found.image_shape),
    )


def _rate(text: str) -> float:
    if not 0 < float(text) < 1:
        raise ValueError(f"{text} is not a fraction to remove")
    return float(text)


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text} is not a number of images or threads")
    return int(text)


def _threads(text: str) -> int:
    return os.cpu_count() or 1 if text == "all" else _count(text)


def _listed(option: str, text: str | None, parse: Callable[[str], Value], kind: str) -> tuple[Value, ...]:
    """The values of a list with commas, each once."""
    if text is None:
        return ()
    try:
        return tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
    except ValueError as error:
        raise ValueError(f"{option} must be {kind}, with commas between; got {text!r}") from error


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
def _shown_progress(output: console.Output) -> Iterator[OnProgress]:
    """A bar that moves, on a terminal only."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if output.is_quiet or not output.console.is_interactive:
        yield lambda words, done: None
        return
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=output.console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda words, done: progress.update(task, description=words, completed=done)
