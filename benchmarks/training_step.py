"""How long a training step takes in the pipeline, on a GPU: alone, captured or plain, and several runs side by side.

    python benchmarks/training_step.py          # both networks, 1, 2, 4 and 8 runs, about three minutes on one GPU

A step is the first stage's: batch 64 of CIFAR's shape, forward, backward, structured penalty, SGD with momentum, the
choice of batch and learning rate, and the sums of loss and accuracy; bfloat16 and channels last. Milliseconds are wall
time over all steps of all runs, over their number; medians of several rounds, with the least and the most.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from environment import ROOT, describe

import strucspars as ss
from strucspars.data.batches import ResidentBatches
from strucspars.data.image_set import Augmentation, ImageSet
from strucspars.models.preactivation_resnet import PreactivationResNet
from strucspars.training.engine import Engine
from strucspars.training.loss import StageLoss
from strucspars.training.recipe import EngineRecipe, StageRecipe
from strucspars.training.rules import SparsifyRule
from strucspars.training.steps import EpochRunner, TrainingStep, epoch_runner

BATCH = 64
STEPS = 200
# What was asked for: milliseconds alone, and throughput of four runs over one.
TARGETS = {20: 1.45, 56: 3.8}


class BenchmarkRun:
    """One run's network and data on a stream of its own, ready to be stepped."""

    def __init__(self, depth: int, engine: EngineRecipe, seed: int) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        with torch.cuda.stream(self._stream):
            self._runner = self._prepared(depth, Engine(engine), seed)

    def _prepared(self, depth: int, engine: Engine, seed: int) -> EpochRunner:
        torch.manual_seed(seed)
        model = engine.placed(PreactivationResNet(depth)).train()
        config = ss.SparsifyConfig(target=0.5, epochs=10, lambda_step=1e-6, lambda_warmup_epochs=0)
        sparsifier = ss.Sparsifier(model, config)
        sparsifier.end_epoch()
        images = torch.randint(256, (BATCH * STEPS, 3, 32, 32), dtype=torch.uint8)
        batches = ResidentBatches(
            split=ImageSet(images, torch.randint(10, (len(images),))),
            mean=(0.5, 0.5, 0.5),
            std=(0.25, 0.25, 0.25),
            batch_size=BATCH,
            device=engine.device,
            shuffled=True,
            augmentation=Augmentation(padding=4, flip=True),
            seed=seed,
            memory_format=engine.memory_format,
        )
        step = TrainingStep(engine, model, StageRecipe(epochs=10), StageLoss(), SparsifyRule(sparsifier))
        return epoch_runner(engine, step, batches)

    def run(self, steps: int) -> None:
        """Some steps of an epoch, to their end on the device."""
        done: list[int] = []

        def should_stop() -> bool:
            done.append(1)
            return len(done) >= steps

        with torch.cuda.stream(self._stream):
            self._runner.run(1, [0.01] * STEPS, start_step=0, should_stop=should_stop, on_step=lambda step: None)
            self._stream.synchronize()


def milliseconds(runs: list[BenchmarkRun], steps: int) -> float:
    """Wall time per step and run, all runs at once in threads of their own."""
    with ThreadPoolExecutor(len(runs)) as threads:
        begin = time.perf_counter()
        for future in [threads.submit(run.run, steps) for run in runs]:
            future.result()
        elapsed = time.perf_counter() - begin
    return 1000 * elapsed / (steps * len(runs))


def spread(measure: Callable[[], float], rounds: int) -> dict[str, float]:
    """Median, least and most of several rounds, after one to warm up."""
    measure()
    values = [measure() for _ in range(rounds)]
    return {"median_ms": statistics.median(values), "least_ms": min(values), "most_ms": max(values)}


def measured(depth: int, engine: EngineRecipe, jobs: list[int], *, rounds: int, steps: int) -> dict[str, Any]:
    """Steps of one network, for every number of runs side by side."""
    runs = [BenchmarkRun(depth, engine, seed) for seed in range(max(jobs))]
    return {str(count): spread(lambda count=count: milliseconds(runs[:count], steps), rounds) for count in jobs}  # type: ignore[misc]


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 56], help="networks")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4, 8], help="runs side by side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "training_step.json", help="where the JSON goes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    torch.backends.cudnn.benchmark = True
    report: dict[str, Any] = {
        "environment": describe(("strucspars", "torch", "lightning")) | {"gpu": torch.cuda.get_device_name()},
        "settings": {"batch": BATCH, "steps": STEPS, "rounds": options.rounds, "precision": "bf16, channels last"},
        "networks": {},
    }
    fast = EngineRecipe(precision="bf16", channels_last=True)
    variants = {
        "captured": (fast, options.jobs),
        "plain": (EngineRecipe(precision="bf16", channels_last=True, cuda_graph=False), [1]),
    }
    if options.compile:
        variants["compiled and captured"] = (EngineRecipe(precision="bf16", channels_last=True, compile=True), [1])
    for depth in options.depths:
        rows: dict[str, Any] = {}
        for name, (engine, jobs) in variants.items():
            steps = STEPS if name != "plain" else STEPS // 4
            rows[name] = measured(depth, engine, jobs, rounds=options.rounds, steps=steps)
            print(f"ResNet-{depth}, {name}: {json.dumps(rows[name])}", flush=True)
        rows["throughput_ratio"] = {
            count: rows["captured"]["1"]["median_ms"] / row["median_ms"] for count, row in rows["captured"].items()
        }
        rows["wanted_ms_alone"] = TARGETS.get(depth)
        report["networks"][f"pre-activation ResNet-{depth}"] = rows
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
