"""What order policies cost in accuracy and win in milliseconds: ResNet-56 on CIFAR-10, trained on GPU, timed on CPU.

    python benchmarks/policy_runs.py train CIFAR10 RUNS            # on a GPU: a minute a run, several side by side
    python benchmarks/policy_runs.py record CIFAR10 RUNS           # on a CPU: writes the JSON and the page

`train` runs the recipe of cifar10-resnet56-60-distilled with batches of 256 and half as many epochs, at two targets, by
policy and seed; runs resume. `record` reads the finished runs, exports their networks to ONNX, scores the files on all
test images and times them in turns in ONNX Runtime, batch 1, one thread.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from environment import ROOT, describe
from order_policies import policy_name, spread

import strucspars as ss
from strucspars.bench.deployed import deployed_networks
from strucspars.bench.suite import TimingRules
from strucspars.cost.text_table import Column, markdown_table
from strucspars.train.observer import RunObserver
from strucspars.train.outcome import read_summary
from strucspars.train.recipe import EngineRecipe, Recipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run import Run
from strucspars.train.run_folder import RunFolder
from strucspars.train.side_by_side import run_side_by_side, wanted_workers
from strucspars.train.solver_pool import solver_pool

OUT = ROOT / "results" / "policy_runs.json"
TEACHER = ROOT / "results" / "cifar10" / "cifar10-resnet56-dense-seed2"
TARGETS = (0.6, 0.75)
POLICIES = [("free", 1), ("shared", 1), ("one-shuffle", 1), ("one-shuffle", 8), ("one-shuffle", 4), ("shared", 4)]
SEEDS = (0, 1)
EPOCHS = (50, 80)
# Four times the paper's batch; the rate grows by the root of that.
BATCH, RATE = 256, 0.2
SITTING = TimingRules(seconds=240.0, max_rounds=200)


def cells(policies: Sequence[tuple[str, int]], seeds: Sequence[int]) -> list[tuple[str, int, float, int]]:
    """Policy, pieces, target and seed of every run, in the order in which they are wanted."""
    plain = [(*policy, target, seed) for seed in seeds for policy in policies if policy[1] == 1 for target in TARGETS]
    pieces = [(*policy, target, seed) for policy in policies if policy[1] > 1 for seed in seeds for target in TARGETS]
    return plain + pieces


def recipe_of(orders: str, pieces: int, target: float, seed: int, data: Path) -> Recipe:
    """The paper's protocol with a teacher, in fewer and larger steps."""
    first, second = EPOCHS
    return read_recipe(
        "cifar10-resnet56-60-distilled",
        [
            f"name=resnet56-{100 * target:.0f}-{orders}{'' if pieces == 1 else f'-{pieces}'}-seed{seed}",
            f"seed={seed}",
            f"data.root={data}",
            f"data.batch_size={BATCH}",
            f"sparsify.target={target}",
            f"sparsify.orders={orders}",
            f"sparsify.pieces={pieces}",
            "sparsify.lambda_step=null",
            f"stage1.epochs={first}",
            f"stage1.lr={RATE}",
            f"stage2.epochs={second}",
            f"stage2.lr={RATE}",
            f"finetune.teacher={TEACHER}",
            "engine.precision=bf16",
            "engine.channels_last=true",
        ],
    )


class Lines(RunObserver):
    """One line for every tenth epoch."""

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        """Print what matters of the row."""
        shown = ("stage", "epoch", "test_top1", "removed_fraction", "seconds")
        if row["epoch"] % 10 == 0:
            print(run, {key: row[key] for key in shown if key in row}, flush=True)


def train(options: argparse.Namespace) -> None:
    """Run what is not finished."""
    recipes = [recipe_of(*cell, options.data) for cell in cells(options.policies, options.seeds)]
    folders = {options.runs / recipe.name: recipe for recipe in recipes}
    with solver_pool(wanted_workers(recipes[0].engine)) as executor:
        outcomes = run_side_by_side(folders, jobs=options.jobs, observers=[Lines()], executor=executor)
    for path, outcome in outcomes.items():
        print(path.name, repr(outcome) if isinstance(outcome, Exception) else outcome.converted_top1)


def row_of(folder: RunFolder) -> dict[str, Any]:
    """What the run itself says."""
    summary, recipe = read_summary(folder), folder.load_recipe()
    assert summary is not None
    return {
        "run": recipe.name,
        "policy": policy_name(recipe.sparsify.orders, recipe.sparsify.pieces),
        "target": recipe.sparsify.target,
        "seed": recipe.seed,
        "removed_params": round(summary.removed_param_fraction, 4),
        "removed_macs": round(summary.removed_mac_fraction, 4),
        "kept_norm": round(summary.min_kept_norm or 0.0, 4),
        "compressed": round(100 * (summary.compressed_top1 or 0.0), 2),
        "top1": round(100 * summary.converted_top1, 2),
        "best_top1": round(100 * summary.finetuned.best_top1, 2),
    }


def record(options: argparse.Namespace) -> None:
    """Time and score all finished runs in one sitting, and write what came out."""
    torch.set_num_threads(1)
    folders = [folder for folder in map(RunFolder, sorted(options.runs.iterdir())) if folder.is_finished]
    rows: list[dict[str, Any]] = []
    networks: dict[str, tuple[torch.nn.Module, Path]] = {}
    with tempfile.TemporaryDirectory() as place:
        for folder in folders:
            recipe = replace(folder.load_recipe([f"data.root={options.data}"]), engine=EngineRecipe(device="cpu"))
            run = Run(recipe, folder)
            if not networks:
                dense = ss.load(TEACHER / "model.safetensors", run.fresh_model()).eval()
                networks["dense"] = (dense, Path(place) / "dense.onnx")
            model = ss.load(folder.model_path, run.fresh_model()).eval()
            networks[recipe.name] = (model, Path(place) / f"{recipe.name}.onnx")
            folded = ss.fold_report(ss.fold(model, torch.zeros(1, 3, 32, 32)))
            rows.append(row_of(folder) | {"gathers": None if folded is None else len(folded.gathers)})
        found = deployed_networks(networks, image_shape=(3, 32, 32), batches=run.test.epoch(0), rules=SITTING)
    for row in rows:
        deployed, faster = found.networks[row["run"]]
        row |= {
            "exported_top1": round(100 * (deployed.top1 or 0.0), 2),
            "ms": round(deployed.ms, 4),
            "speedup": [round(each, 3) for each in (faster.low, faster.median, faster.high)],
        }
    environment = describe(("strucspars", "torch", "onnxruntime")) | {
        "command": "python benchmarks/policy_runs.py record CIFAR10 RUNS"
    }
    teacher, _ = found.networks["dense"]
    record = {
        "environment": environment,
        "training": json.loads((folders[0].path / "environment.json").read_text()),
        "dense": {"top1": round(100 * (teacher.top1 or 0.0), 2), "ms": round(teacher.ms, 4)},
        "rows": rows,
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Every policy at both targets."""
    names = [policy_name(*policy) for policy in POLICIES]
    found = sorted({(row["target"], names.index(row["policy"])) for row in rows})
    each = [[row for row in rows if (row["target"], names.index(row["policy"])) == cell] for cell in found]
    columns = [
        Column("removed", [f"{100 * target:.0f} %" for target, _ in found]),
        Column("orders", [names[place] for _, place in found], is_text=True),
        Column("runs", [str(len(runs)) for runs in each]),
        Column("kept norm", [f"{statistics.mean(row['kept_norm'] for row in runs):.3f}" for runs in each]),
        Column("shuffles left", ["/".join(sorted({str(row["gathers"]) for row in runs})) for runs in each]),
        Column("top-1", [spread([row["top1"] for row in runs]) for runs in each]),
        Column("ms", [spread([row["ms"] for row in runs]) for runs in each]),
        Column("times dense", [spread([row["speedup"][1] for row in runs]) for runs in each]),
    ]
    return markdown_table(columns)


def main() -> None:
    """Train or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "record"])
    parser.add_argument("data", type=Path, help="folder that holds cifar-10-batches-py")
    parser.add_argument("runs", type=Path, help="folder of the run folders")
    parser.add_argument("--jobs", type=int, default=6, help="runs side by side")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    options.policies = POLICIES
    train(options) if options.step == "train" else record(options)


if __name__ == "__main__":
    main()
