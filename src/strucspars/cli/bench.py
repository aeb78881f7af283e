"""`strucspars bench`: time networks dense and compressed, in stock runtimes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from strucspars.cli import console
from strucspars.train.observer import RunFailed

if TYPE_CHECKING:
    from strucspars.bench.networks import BenchNetwork

EXAMPLES = console.examples(
    "strucspars bench",
    "strucspars bench resnet50 --orders free,shared,one-shuffle",
    "strucspars bench resnet50 --orders shared --runtimes onnxruntime,openvino,onnxruntime-int8,openvino-int8",
    "strucspars bench resnet101 --runtimes onnxruntime,openvino --out bench.json",
    "strucspars bench trained.pt --model resnet50 --orders shared",
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
    orders: Annotated[
        str,
        typer.Option(metavar="A,B", help="Which layers share channel orders: free, shared, one-shuffle, or others."),
    ] = "free",
    runtimes: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Of onnxruntime, pytorch, torch-compile, openvino, onnxruntime-int8, openvino-int8.",
        ),
    ] = "onnxruntime,pytorch,openvino",
    batch: Annotated[str, typer.Option(metavar="1,16", help="Batch sizes.")] = "1",
    threads: Annotated[str, typer.Option(metavar="1,all", help="Numbers of threads.")] = "1",
    min_channels_per_group: console.MinChannelsPerGroup = 1,
    widen_groups_below: console.WidenGroupsBelow = None,
    seconds: Annotated[float, typer.Option(help="Time per network, batch and number of threads.")] = 90.0,
    model: console.Model = None,
    classes: console.Classes = None,
    image_shape: console.ImageShapeOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the results to this JSON file.", callback=console.from_home)
    ] = None,
    force: console.Force = False,
    quiet: console.Quiet = False,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Time a network dense and compressed, on this machine's processor, and print the paper's Table 4 beside it.

    A network by name gets random weights and channel orders: its speed does not depend on training. With the dense
    weights of a file and --rates or --orders, channel orders are learned from the weights. Before a program is timed,
    its outputs are compared with PyTorch's. Run nothing else on the machine meanwhile.
    """
    from strucspars.bench.networks import PAPER_GROUPS, networks_of_run, random_networks, trained_networks
    from strucspars.bench.results import report_text
    from strucspars.bench.suite import Subject, TimingRules
    from strucspars.bench.suite import bench as run_bench
    from strucspars.cli.networks import find_target, refuse_ignored
    from strucspars.export.storage import read_plan
    from strucspars.io.files import followed, write_text
    from strucspars.paper.published import PAPER_TIMES

    output, cores = console.Output(as_json=as_json, quiet=quiet), str(os.cpu_count() or 1)
    shape = console.parse_image_shape(image_shape)
    found = find_target(network, model=model, classes=classes, image_shape=shape)
    width = None if min_channels_per_group == 1 else min_channels_per_group
    chosen = {"--rates": rates, "--min-channels-per-group": width, "--orders": None if orders == "free" else orders}
    if found.folder is not None or (found.weights is not None and read_plan(Path(found.weights)) is not None):
        refuse_ignored(f"the network in {network} has its own", chosen)
    policies = listed("--orders", orders, str, "names")
    usual = tuple(PAPER_GROUPS.get(found.name, (0.5,)))
    wanted = usual if rates is None else listed("--rates", rates, rate, "fractions between 0 and 1")

    def build() -> list[BenchNetwork]:
        rules: dict[str, Any] = {"min_channels_per_group": min_channels_per_group, "orders": policies}
        if found.weights is None:
            classes = found.num_classes or 1
            return random_networks(found.name, wanted, image_shape=found.image_shape, num_classes=classes, **rules)
        if any(option is not None for option in chosen.values()):
            return trained_networks(found.network(), found.name, wanted, image_shape=found.image_shape, **rules)
        return networks_of_run(found.dense(), found.network().eval(), found.image_shape)

    subject = Subject(
        network=network if found.weights is None else Path(network).expanduser().resolve().name,
        image_shape=found.image_shape,
        build=build,
        runtimes=listed("--runtimes", runtimes, str, "names"),
        batches=listed("--batch", batch, _count, "whole numbers from 1 on"),
        threads=listed("--threads", threads.replace("all", cores), _count, "whole numbers from 1 on, or all"),
        widen_groups_below=widen_groups_below,
    )
    rules = TimingRules(seconds=seconds)
    if out is not None:
        console.check_can_be_written(out, force=force)
    with console.work_progress(output) as on_progress:
        report = run_bench(subject, command=_command(context), rules=rules, on_progress=on_progress)
    if out is not None:
        write_text(followed(out), report.to_json())
    output.outcome(report_text(report, PAPER_TIMES), report.document())
    errors = [row.error for row in report.rows if row.error]
    if errors:
        raise RunFailed(f"{len(errors)} of {len(report.rows)} programs were not timed; the first: {errors[0]}")


def rate(text: str) -> float:
    """A fraction to remove."""
    if not 0 < float(text) < 1:
        raise ValueError(f"{text} is not a fraction to remove")
    return float(text)


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text} is not a number of images or threads")
    return int(text)


def listed(option: str, text: str, parse: Callable[[str], Value], kind: str) -> tuple[Value, ...]:
    """The values of a comma-separated list, without duplicates."""
    try:
        return tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
    except ValueError as error:
        raise ValueError(f"{option} must be {kind}, separated by commas; got {text!r}") from error


def _command(context: typer.Context) -> str:
    """The command that repeats the measurement. Of paths elsewhere it has only the last part: reports are published."""
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
