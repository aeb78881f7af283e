"""What the structured penalty adds to a training step, on a GPU.

    python benchmarks/penalty.py            # ResNet-50 and the CIFAR ResNet-56, batch 64, about two minutes on one GPU

Variants of one step (forward, backward, SGD with momentum): without penalty, with `regularize_()` after the backward
pass, with `penalty()` in the loss. Eager, and the whole step captured in a CUDA graph. The variants take turns, so that
drifts hit all alike; medians of the rounds, with the 10th and 90th percentile.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from environment import ROOT, describe
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.models.cifar import PreactivationResNet

BATCH = 64
VARIANTS = ("without", "regularize_", "penalty")
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "ResNet-50": (lambda: torchvision.models.resnet50(weights=None), 224, 1000),
    "CIFAR ResNet-56": (lambda: PreactivationResNet(56), 32, 10),
}


@dataclass(frozen=True)
class Spread:
    """Milliseconds of one step."""

    median_ms: float
    low_ms: float
    high_ms: float


def training_step(name: str, variant: str) -> Callable[[], None]:
    """One optimizer step of a fresh network on random data, in bfloat16 and channels last."""
    build, side, classes = NETWORKS[name]
    torch.manual_seed(0)
    model = build().cuda().to(memory_format=torch.channels_last)
    config = ss.SparsifyConfig(target=0.5, epochs=10, controller="paper", lambda_step=1e-6, lambda_warmup=0)
    sparsifier = ss.Sparsifier(model, config)
    sparsifier.end_epoch()
    assert sparsifier.lambda_value > 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    images = torch.randn(BATCH, 3, side, side, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(classes, (BATCH,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(images), labels)
        if variant == "penalty":
            loss = loss + sparsifier.penalty()
        torch.autograd.backward(loss)
        if variant == "regularize_":
            sparsifier.regularize_()
        optimizer.step()

    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph, after the warm-up that capturing needs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(step: Callable[[], None], repeats: int) -> float:
    """Mean time of one step over some repeats, by device events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # likewise
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def measure(name: str, *, graph: bool, rounds: int, repeats: int) -> dict[str, Any]:
    """All variants of one network in turns, and what the penalty adds."""
    steps = {variant: training_step(name, variant) for variant in VARIANTS}
    if graph:
        steps = {variant: captured(step) for variant, step in steps.items()}
    for step in steps.values():
        milliseconds(step, 5)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, step in steps.items():
            times[variant].append(milliseconds(step, repeats))
    spreads = {variant: _spread(values) for variant, values in times.items()}
    added = {variant: spreads[variant].median_ms / spreads["without"].median_ms - 1 for variant in VARIANTS[1:]}
    return {variant: asdict(spread) for variant, spread in spreads.items()} | {"added_fraction": added}


def _spread(values: list[float]) -> Spread:
    deciles = statistics.quantiles(values, n=10)
    return Spread(statistics.median(values), deciles[0], deciles[-1])


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="turns of the variants")
    parser.add_argument("--repeats", type=int, default=10, help="steps per turn")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "penalty.json", help="where the JSON goes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    torch.backends.cudnn.benchmark = True
    report: dict[str, Any] = {
        "environment": describe(("strucspars", "torch", "torchvision")) | {"gpu": torch.cuda.get_device_name()},
        "settings": {"batch": BATCH, "precision": "bfloat16 autocast, channels last"} | _plain(options),
        "networks": {},
    }
    for name in NETWORKS:
        for mode in ("eager", "graph"):
            row = measure(name, graph=mode == "graph", rounds=options.rounds, repeats=options.repeats)
            report["networks"][f"{name}, {mode}"] = row
            print(f"{name}, {mode}: {json.dumps(row)}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {options.out}")


def _plain(options: argparse.Namespace) -> dict[str, int]:
    return {"rounds": options.rounds, "repeats": options.repeats}


if __name__ == "__main__":
    main()
