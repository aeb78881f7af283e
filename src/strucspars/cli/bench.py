"""`strucspars bench`: how much faster compressed networks are, in stock runtimes."""

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from strucspars.bench.networks import PAPER_GROUPS, BenchNetwork, networks_of_run, random_networks
from strucspars.bench.paper_times import PAPER_NETWORK
from strucspars.bench.results import BenchReport
from strucspars.bench.runtimes import RUNTIMES
from strucspars.bench.sitting import Observer
from strucspars.bench.suite import DEFAULT_RUNTIMES, BenchSettings, Subject
from strucspars.bench.suite import bench as run_bench
from strucspars.bench.text import report_text
from strucspars.bench.timing import TimingRules
from strucspars.cli.console import (
    Classes,
    Debug,
    Force,
    ImageShapeOption,
    Json,
    Output,
    Quiet,
    check_can_be_written,
    examples,
    from_home,
    parsed_image_shape,
)
from strucspars.cli.errors import RunFailed
from strucspars.cli.evaluate import check_has_network
from strucspars.cli.networks import (
    ImageShape,
    check_named,
    dense_network,
    refuse_ignored,
    saved_image_shape,
    saved_network,
    usual_classes,
    usual_image_shape,
)
from strucspars.core.checks import checked_at_least
from strucspars.io.files import followed, write_text
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder

OTHER_RATES = (0.5,)
FULL_BATCHES = (1, 16)
# Beside ResNet-50: the paper's other networks, where deployment happens.
FULL_NETWORKS = ("resnet101", "densenet201")
FULL_NETWORKS_RUNTIMES = ("onnxruntime", "openvino")
ALL = "all"
_VALUE_EXAMPLES = {"--rates": "0.35,0.65", "--runtimes": "onnxruntime,pytorch", "--batch": "1,16", "--threads": "1,all"}

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The options of the command as they were given; None for what was not.

    Attributes:
        network: a name, or the folder of a run.
        rates, runtimes, batches, threads: lists with commas.
        min_channels_per_group: no group narrower than this.
        widen_groups_below: run groups narrower than this as wider ones; None: as an export does by default.
        seconds: of timing.
        is_full: measure everything that the paper's networks have to tell.
        model: name of the network of a run, where that is a function.
        classes, image_shape: of a network by name.
    """

    network: str = "resnet50"
    rates: str | None = None
    runtimes: str | None = None
    batches: str | None = None
    threads: str | None = None
    min_channels_per_group: int = 1
    widen_groups_below: int | None = None
    seconds: float = 90.0
    is_full: bool = False
    model: str | None = None
    classes: int | None = None
    image_shape: ImageShape | None = None

    @property
    def command(self) -> str:
        """What to type for the same again. Of a path from outside only the name: where it lies is nobody's business."""
        options = {
            "--rates": self.rates,
            "--runtimes": self.runtimes,
            "--batch": self.batches,
            "--threads": self.threads,
            "--min-channels-per-group": None if self.min_channels_per_group == 1 else self.min_channels_per_group,
            "--widen-groups-below": self.widen_groups_below,
            "--seconds": f"{self.seconds:g}",
            "--model": self.model,
            "--classes": self.classes,
            "--image-shape": None if self.image_shape is None else "x".join(map(str, self.image_shape)),
        }
        given = [str(part) for option in options.items() if option[1] is not None for part in option]
        path = Path(self.network)
        name = path.name if path.is_absolute() or ".." in path.parts else self.network
        return shlex.join(["strucspars", "bench", name, *given, *(["--full"] if self.is_full else [])])


@dataclass(frozen=True)
class Benchmarked:
    """A report for people and for scripts."""

    report: BenchReport

    def text(self) -> str:
        """For people."""
        return report_text(self.report)

    def document(self) -> dict[str, Any]:
        """For scripts."""
        return self.report.document()

    def raise_errors(self) -> None:
        """Raise `RunFailed` if something could not be timed: a script must not take that for success."""
        errors = [row.error for row in self.report.rows if row.error]
        if errors:
            raise RunFailed(f"{len(errors)} of {len(self.report.rows)} programs were not timed; the first: {errors[0]}")


def benchmarked(request: BenchRequest, *, out: Path | None, output: Output, force: bool = False) -> Benchmarked:
    """Measure what is asked for.

    Args:
        request: what.
        out: a file for the report as JSON.
        output: where to show how far it is.
        force: replace a file that is there.

    Raises:
        ValueError: an option makes no sense.
        OSError: the file is there already, or cannot be written.
    """
    subjects = bench_subjects(request)
    rules = TimingRules(seconds=request.seconds)
    if out is not None:
        check_can_be_written(out, force=force)
    with _shown_progress(output) as observer:
        report = run_bench(subjects, command=request.command, rules=rules, observer=observer)
    if out is not None:
        write_text(followed(out), report.to_json())
    return Benchmarked(report)


def bench_subjects(request: BenchRequest) -> list[Subject]:
    """The networks of a request; none of them is built yet.

    Raises:
        ValueError: an option makes no sense.
    """
    settings = _settings(request)
    if _is_folder(request.network):
        return [_subject_of_run(request, settings)]
    _refuse_path(request.network, request.model)
    subjects = [_subject_of_name(request, request.network, _rates(request), settings)]
    if request.is_full:
        kept = tuple(name for name in FULL_NETWORKS_RUNTIMES if name in settings.runtimes)
        names = FULL_NETWORKS if kept and request.network == PAPER_NETWORK else ()
        subjects += [
            _subject_of_name(
                request,
                name,
                tuple(PAPER_GROUPS[name]),
                BenchSettings(runtimes=kept, widen_groups_below=request.widen_groups_below),
            )
            for name in names
        ]
    return subjects


def _refuse_path(network: str, model: str | None) -> None:
    """Refuse what is no folder and cannot be a name: as the name of a network it would be a riddle."""
    path = Path(network).expanduser()
    if path.is_file() or ("/" in network and ":" not in network):
        what = f"{network} is a file" if path.is_file() else f"there is no folder {network}"
        raise ValueError(f"{what}; bench takes the folder of a finished run, or a network by name")
    refuse_ignored(f"it is for runs, and there is no folder {network!r}", {"--model": model})


def _subject_of_name(request: BenchRequest, name: str, rates: tuple[float, ...], settings: BenchSettings) -> Subject:
    shape = request.image_shape or usual_image_shape(name)
    build = partial(
        random_networks,
        name,
        rates,
        image_shape=shape,
        num_classes=request.classes or usual_classes(name),
        min_channels_per_group=request.min_channels_per_group,
    )
    return Subject(name=name, image_shape=shape, networks=build, settings=settings)


def _subject_of_run(request: BenchRequest, settings: BenchSettings) -> Subject:
    ignored = {
        "--rates": request.rates,
        "--classes": request.classes,
        "--image-shape": request.image_shape,
        "--min-channels-per-group": None if request.min_channels_per_group == 1 else request.min_channels_per_group,
    }
    refuse_ignored(f"the run in {request.network} has its own", ignored)
    folder = RunFolder(Path(request.network).expanduser())
    check_has_network(folder)
    recipe = read_recipe(folder.recipe_path)
    check_named(folder, recipe.model.name, named=request.model, option="--model ")
    shape = saved_image_shape(folder, recipe)

    def networks() -> list[BenchNetwork]:
        return networks_of_run(dense_network(folder, recipe), saved_network(folder, recipe).eval(), shape)

    return Subject(name=folder.path.resolve().name, image_shape=shape, networks=networks, settings=settings)


def _settings(request: BenchRequest) -> BenchSettings:
    cores = os.cpu_count() or 1
    all_threads = (1, cores) if cores > 1 else (1,)

    def number_of_threads(text: str) -> int:
        return cores if text == ALL else int(text)

    full = request.is_full
    return BenchSettings(
        runtimes=_listed("--runtimes", request.runtimes, str) or (tuple(RUNTIMES) if full else DEFAULT_RUNTIMES),
        batches=_counts("--batch", request.batches, int) or (FULL_BATCHES if full else (1,)),
        threads=_counts("--threads", request.threads, number_of_threads) or (all_threads if full else (1,)),
        widen_groups_below=request.widen_groups_below,
    )


def _rates(request: BenchRequest) -> tuple[float, ...]:
    usual = tuple(PAPER_GROUPS.get(request.network, OTHER_RATES))
    rates = _listed("--rates", request.rates, float) or usual
    for rate in rates:
        if rate == 0:
            raise ValueError("--rates: a rate of 0 is the dense network, which is always there; leave it out")
        if not 0 < rate < 1:
            raise ValueError(f"--rates: a rate is a removed fraction and must lie between 0 and 1, got {rate:g}")
    return rates


def _counts(option: str, text: str | None, parse: Callable[[str], int]) -> tuple[int, ...]:
    return tuple(checked_at_least(option, value, 1) for value in _listed(option, text, parse))


def _listed(option: str, text: str | None, parse: Callable[[str], Value]) -> tuple[Value, ...]:
    """The values of a list with commas, each once."""
    if text is None:
        return ()
    try:
        values = tuple(parse(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"{option} must be values with commas between, such as {_VALUE_EXAMPLES[option]}; got {text!r}"
        ) from error
    return tuple(dict.fromkeys(values))


def _is_folder(network: str) -> bool:
    return Path(network).expanduser().is_dir()


@contextmanager
def _shown_progress(output: Output) -> Iterator[Observer]:
    """A bar that moves; nothing where nothing can move."""
    if output.is_quiet or not output.console.is_interactive:
        yield lambda words, done: None
        return
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=output.console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda words, done: progress.update(task, description=words, completed=done)


EXAMPLES = examples(
    "strucspars bench",
    "strucspars bench --full --out bench.json",
    "strucspars bench runs/demo --batch 1,16 --threads 1,all",
    "strucspars bench timm:mobilenetv3_small_100 --rates 0.3 --runtimes onnxruntime --min-channels-per-group 16",
)

Network = Annotated[str, typer.Argument(metavar="NETWORK", help="A network by name, or the folder of a finished run.")]
Rates = Annotated[
    str | None,
    typer.Option(
        metavar="0.35,0.65",
        help="Fractions of the convolutions' weights to remove.",
        show_default="the paper's for resnet50, resnet101 and densenet201, else 0.5",
    ),
]
Runtimes = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Of onnxruntime, pytorch, torch-compile, openvino.",
        show_default="onnxruntime,pytorch,openvino; with --full all",
    ),
]
Batches = Annotated[
    str | None, typer.Option("--batch", metavar="1,16", help="Images at a time.", show_default="1; with --full 1,16")
]
Threads = Annotated[
    str | None, typer.Option(metavar="1,all", help="Threads of a runtime.", show_default="1; with --full 1,all")
]
MinWidth = Annotated[int, typer.Option(min=1, help="No group narrower than this.")]
Widen = Annotated[
    int | None,
    typer.Option(
        "--widen-groups-below",
        metavar="CHANNELS",
        min=1,
        help="Run narrower groups as wider ones, with zeros between.",
        show_default="as export does: 16 for onnxruntime and openvino, else 1",
    ),
]
Seconds = Annotated[float, typer.Option(help="Timing of each network at each batch and number of threads.")]
Full = Annotated[
    bool, typer.Option("--full", help="More batches, threads and runtimes; resnet101 and densenet201 too. Takes long.")
]
Out = Annotated[Path | None, typer.Option(help="A JSON file to write as well.", show_default=False, callback=from_home)]
Model = Annotated[
    str | None, typer.Option(help="For a run whose network is a function: its name again.", show_default=False)
]


def bench(
    network: Network = "resnet50",
    rates: Rates = None,
    runtimes: Runtimes = None,
    batch: Batches = None,
    threads: Threads = None,
    min_channels_per_group: MinWidth = 1,
    widen_groups_below: Widen = None,
    seconds: Seconds = 90.0,
    full: Full = False,
    model: Model = None,
    classes: Classes = None,
    image_shape: ImageShapeOption = None,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time a network dense and compressed, on this machine's processor, and print the paper's Table 4 beside it.

    A network by name gets random weights and channel orders: its speed does not depend on training. Nothing is timed
    before its outputs are those of PyTorch. Do not use the machine for anything else meanwhile.
    """
    from strucspars.cli.bench import BenchRequest, benchmarked

    request = BenchRequest(
        network=network,
        rates=rates,
        runtimes=runtimes,
        batches=batch,
        threads=threads,
        min_channels_per_group=min_channels_per_group,
        widen_groups_below=widen_groups_below,
        seconds=seconds,
        is_full=full,
        model=model,
        classes=classes,
        image_shape=None if image_shape is None else parsed_image_shape(image_shape),
    )
    output = Output(as_json=as_json, quiet=quiet)
    done = benchmarked(request, out=out, force=force, output=output)
    output.outcome(done.text(), done.document())
    done.raise_errors()
