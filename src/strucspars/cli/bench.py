"""`strucspars bench`: how much faster compressed networks are, in stock runtimes."""

from pathlib import Path
from typing import Annotated

import typer

from strucspars.cli.options import (
    Classes,
    Debug,
    Force,
    ImageShape,
    Json,
    Quiet,
    examples,
    from_home,
    parsed_image_shape,
)
from strucspars.cli.output import Output

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
    image_shape: ImageShape = None,
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
    from strucspars.cli.benchmarking import BenchRequest, benchmarked

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
