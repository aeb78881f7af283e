"""How long a training step takes in the pipeline, on a GPU: plain, captured, compiled too; alone and side by side.

    python benchmarks/training_step.py     # both networks, 1 and 4 runs, three processes: some minutes on one GPU

A step is the first stage's: batch 64 of CIFAR's shape, forward, backward, structured penalty, SGD with momentum, the
choice of batch and learning rate, and the sums of loss and accuracy; bfloat16 and channels last. Milliseconds are wall
time over all steps of all runs of an epoch, over their number; in each process the median of several rounds. Which
kernels cuDNN takes is decided anew in every process and makes a difference of a tenth: what counts is the median of
several processes, with the least and the most.

Captured is `engine.cuda_graph`, which is on by default; compiled is `engine.compile=true` with it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from environment import ROOT, describe

import strucspars as ss
from strucspars.data.batches import EpochOrder, ResidentBatches
from strucspars.data.image_set import Augmentation, ImageSet
from strucspars.models.cifar import PreactivationResNet
from strucspars.train.engine import Engine
from strucspars.train.epochs import EpochRunner, epoch_runner
from strucspars.train.recipe import EngineRecipe, StageRecipe
from strucspars.train.rules import SparsifyRule
from strucspars.train.steps import StageLoss, TrainingStep

BATCH = 64
STEPS = 300
# What was asked for, in milliseconds alone.
TARGETS = {20: 1.45, 56: 3.8}
HALF = EngineRecipe(precision="bf16", channels_last=True)
WAYS = {"captured": HALF, "compiled": replace(HALF, compile=True)}
PLAIN = replace(HALF, cuda_graph=False)
PLAIN_STEPS = 30


class BenchmarkRun:
    """One run's network and data on a stream of its own, ready to be stepped."""

    def __init__(self, depth: int, engine: EngineRecipe, seed: int) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        with torch.cuda.stream(self._stream):
            self._runner = self._prepared(depth, Engine(engine), seed)

    def _prepared(self, depth: int, engine: Engine, seed: int) -> EpochRunner:
        torch.manual_seed(seed)
        model = engine.placed(PreactivationResNet(depth)).train()
        config = ss.SparsifyConfig(target=0.5, epochs=10, controller="paper", lambda_step=1e-6, lambda_warmup=0)
        sparsifier = ss.Sparsifier(model, config)
        sparsifier.end_epoch()
        images = torch.randint(256, (BATCH * STEPS, 3, 32, 32), dtype=torch.uint8)
        batches = ResidentBatches(
            ImageSet(images, torch.randint(10, (len(images),))),
            EpochOrder(count=len(images), batch_size=BATCH, shuffled=True, seed=seed),
            mean=(0.5, 0.5, 0.5),
            std=(0.25, 0.25, 0.25),
            device=engine.device,
            augmentation=Augmentation(padding=4, flip=True),
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


def median_of_rounds(runs: list[BenchmarkRun], steps: int, rounds: int) -> float:
    """Median of several rounds, after one to warm up."""
    milliseconds(runs, steps)
    return statistics.median(milliseconds(runs, steps) for _ in range(rounds))


def measured_here(depths: list[int], jobs: list[int], *, rounds: int) -> dict[str, Any]:
    """Milliseconds of this process: by network and way, for every number of runs side by side."""
    found: dict[str, Any] = {}
    for depth in depths:
        rows = {}
        for way, engine in WAYS.items():
            runs = [BenchmarkRun(depth, engine, seed) for seed in range(max(jobs))]
            rows[way] = {str(count): median_of_rounds(runs[:count], STEPS, rounds) for count in jobs}
        rows["plain"] = {"1": median_of_rounds([BenchmarkRun(depth, PLAIN, seed=0)], PLAIN_STEPS, rounds)}
        found[str(depth)] = rows
    return found


def measured_in_processes(processes: int, arguments: list[str]) -> list[dict[str, Any]]:
    """The same, in so many processes one after the other."""
    found = []
    for number in range(processes):
        command = [sys.executable, __file__, "--here", *arguments]
        outcome = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(outcome.stdout.splitlines()[-1]))
        print(f"process {number + 1} of {processes}: {json.dumps(found[-1])}", flush=True)
    return found


def summarised(depth: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """One network over all processes."""
    report: dict[str, Any] = {}
    for way, counts in found[0][str(depth)].items():
        report[way] = {}
        for count in counts:
            values = [process[str(depth)][way][count] for process in found]
            report[way][count] = {
                "median_ms": statistics.median(values),
                "least_ms": min(values),
                "most_ms": max(values),
            }
    captured = {count: row["median_ms"] for count, row in report["captured"].items()}
    ratios = {count: captured["1"] / milliseconds for count, milliseconds in captured.items()}
    return report | {"throughput_ratio": ratios, "wanted_ms_alone": TARGETS.get(depth)}


def markdown(report: dict[str, Any]) -> str:
    """The medians as a table."""
    rows = [
        "| network | captured | compiled | four side by side, captured | compiled |",
        "| --- | --- | --- | --- | --- |",
    ]
    for network, row in report["networks"].items():
        medians = [row[way][count]["median_ms"] for count in ("1", "4") for way in WAYS]
        rows.append(f"| {network} | " + " | ".join(f"{median:.2f}" for median in medians) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 56], help="networks")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 4], help="runs side by side; 1 must be among them")
    parser.add_argument("--rounds", type=int, default=3, help="in each process")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--here", action="store_true", help="measure in this process, and print its numbers alone")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "training_step.json", help="where the JSON goes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    if 1 not in options.jobs:
        parser.error("--jobs must have 1 among them: the others are compared with it")
    if options.here:
        print(json.dumps(measured_here(options.depths, options.jobs, rounds=options.rounds)))
        return
    lists = {"--depths": options.depths, "--jobs": options.jobs, "--rounds": [options.rounds]}
    arguments = [word for flag, values in lists.items() for word in (flag, *map(str, values))]
    found = measured_in_processes(options.processes, arguments)
    settings = {"batch": BATCH, "steps": STEPS, "rounds": options.rounds, "processes": options.processes}
    report = {
        "environment": describe(("strucspars", "torch", "lightning")) | {"gpu": torch.cuda.get_device_name()},
        "settings": settings | {"precision": "bf16, channels last"},
        "networks": {f"pre-activation ResNet-{depth}": summarised(depth, found) for depth in options.depths},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
