"""Where the time of a compressed network goes in ONNX Runtime, by kind of layer: what keeps it from its operations.

    python benchmarks/inference_layers.py          # ResNet-50 at the paper's rates, one thread, about a minute

Every network runs with ONNX Runtime's profiler: dense, compressed, and "bound", the compressed one without any shuffle.
Milliseconds are medians over the runs of the sum over all operations of a kind. Writes results/inference/layers.json.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from environment import ROOT, describe

from strucspars.bench.networks import PAPER_GROUPS, random_networks
from strucspars.cost.counting import count_macs
from strucspars.export.checked import export

IMAGE_SHAPE = (3, 224, 224)
KINDS = {
    "Gather": "gathers",
    "ReorderInput": "changes of layout",
    "ReorderOutput": "changes of layout",
    "Add": "additions and activations on their own",
    "Relu": "additions and activations on their own",
}


def kind(event: dict[str, Any], kernels: dict[tuple[int, ...], str]) -> str:
    """What an operation counts as; convolutions by their kernel."""
    operation = str(event["args"]["op_name"])
    if operation in ("Conv", "FusedConv"):
        weight = tuple(next(iter(event["args"]["input_type_shape"][1].values())))
        return f"{kernels[weight]} convolutions"
    return KINDS.get(operation, "the rest")


def profiled(path: Path, runs: int) -> dict[str, float]:
    """Milliseconds by kind, medians over the runs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_profiling = True
    options.profile_file_prefix = str(path.with_suffix(""))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    image = np.random.default_rng(0).standard_normal((1, *IMAGE_SHAPE), dtype=np.float32)
    for _ in range(runs):
        session.run(None, {session.get_inputs()[0].name: image})
    weights = [tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer if len(tensor.dims) == 4]
    kernels = {weight: f"{weight[2]} x {weight[3]}" for weight in weights}
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0] * runs)
    seen: dict[str, int] = defaultdict(int)
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            run = seen[event["name"]]
            seen[event["name"]] += 1
            totals[kind(event, kernels)][run] += event["dur"] / 1000
    # The first runs fill caches.
    return {name: statistics.median(times[2:]) for name, times in totals.items()}


def measured(name: str, rates: tuple[float, ...], *, runs: int) -> list[dict[str, Any]]:
    """One row per network."""
    rows = []
    example = torch.zeros(1, *IMAGE_SHAPE)
    for network in random_networks(name, rates, image_shape=IMAGE_SHAPE, num_classes=1000):
        with tempfile.TemporaryDirectory() as folder:
            report = export(network.model, Path(folder) / "network.onnx", example_inputs=example)
            times = profiled(report.path, runs)
        rows.append(
            {
                "network": name,
                "rate": network.rate,
                "form": network.form,
                "macs": count_macs(network.model, example).macs,
                "gathers": report.num_gathers,
                "ms": times,
            }
        )
        print(f"{name} {network.rate} {network.form}: {json.dumps(times)}", flush=True)
    return rows


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet50", choices=sorted(PAPER_GROUPS))
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "inference" / "layers.json")
    options = parser.parse_args()
    environment = describe(("strucspars", "torch", "onnx", "onnxruntime"))
    rows = measured(options.network, tuple(PAPER_GROUPS[options.network]), runs=options.runs)
    report = {"environment": environment, "runs": options.runs, "threads": 1, "batch": 1, "rows": rows}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
