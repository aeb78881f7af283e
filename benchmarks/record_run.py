"""Keep a finished run as a result: what is needed to check and repeat it, and nothing of the machine it ran on.

    python benchmarks/record_run.py runs/cifar10-resnet20-40 results/cifar10 --gpu-minutes 3.0

Copies plan, summary, environment, the recipe without the places of data and other runs, and of the metrics what the
tables are made from; plan and metrics, the largest, are packed. `--network` keeps the finished network too, in half
precision.
"""

import argparse
import gzip
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import read_recipe, recipe_yaml
from strucspars.train.run_folder import RunFolder

SMALL_FILES = ("plan.json", "selection.json", "summary.json", "decisions.json")
PACKED = ("plan.json", "metrics.jsonl")
# Timings within an epoch and digits beyond the fifth are left out.
LEFT_OUT = ("train_seconds", "solver_seconds", "mean_churn")
ROUNDED = ("lr", "train_loss", "train_top1", "test_loss", "lambda", "seconds")


def record(run: Path, results: Path, *, gpu_minutes: float, commit: str | None = None, network: bool = False) -> Path:
    """Copy a finished run into the results; returns its folder there."""
    source, target = RunFolder(run), RunFolder(results / run.name)
    if not source.summary_json_path.is_file():
        raise ValueError(f"{run} is not a finished run: it has no {source.summary_json_path.name}")
    target.path.mkdir(parents=True, exist_ok=True)
    for name in SMALL_FILES:
        if (run / name).is_file():
            keep(target.path / name, (run / name).read_bytes())
    metrics = [shortened(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in metrics]
    keep(target.path / "metrics.jsonl", "".join(lines).encode())
    if network:
        save_in_half_precision(source.model_path, target.model_path)
    target.write_recipe(recipe_yaml(_anywhere(read_recipe(source.recipe_path))))
    environment = json.loads(source.environment_path.read_text())
    if commit is not None:
        environment["commit"] = commit
        for each in environment.get("earlier", []):
            each["commit"] = each["commit"] or commit
    environment["gpu_minutes"] = gpu_minutes
    target.write_json(target.environment_path, environment)
    return target.path


def keep(path: Path, content: bytes) -> None:
    """Write a file of a record, packed where it is one of the largest; `RunFolder` reads both."""
    if path.name in PACKED:
        # Without the time of packing, equal records are equal files.
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content, mtime=0))
    else:
        path.write_bytes(content)


def shortened(row: dict[str, float]) -> dict[str, float]:
    """A row of the metrics as it is kept.

    >>> shortened({"epoch": 3, "lr": 0.0010000000000000002, "test_top1": 0.9325, "train_seconds": 6.5})
    {'epoch': 3, 'lr': 0.001, 'test_top1': 0.9325}
    """
    kept = {name: value for name, value in row.items() if name not in LEFT_OUT}
    return {name: float(f"{value:.5g}") if name in ROUNDED else value for name, value in kept.items()}


def save_in_half_precision(source: Path, target: Path) -> None:
    """Copy a saved network with its floating-point tensors as float16; `strucspars.load` reads both."""
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        metadata = file.metadata()
    halves = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    if not all(torch.isfinite(tensor).all() for tensor in halves.values() if tensor.is_floating_point()):
        raise ValueError(f"{source} has values that float16 cannot hold")
    save_file(halves, target, metadata)


def without_place(recipe: Recipe) -> Recipe:
    """The recipe without what depends on the machine: where the data are, and what computes."""
    return replace(
        recipe,
        data=replace(recipe.data, root=None, download=False, workers=None),
        engine=replace(recipe.engine, device="auto", cuda_graph=True, solver_workers=None),
    )


def _anywhere(recipe: Recipe) -> Recipe:
    """The recipe with the runs that it builds on where they usually are."""
    recipe = without_place(recipe)
    return replace(
        recipe,
        sparsify=replace(recipe.sparsify, from_run=_usual_folder(recipe.sparsify.from_run)),
        finetune=replace(recipe.finetune, teacher=_usual_folder(recipe.finetune.teacher)),
    )


def _usual_folder(run: str | None) -> str | None:
    return None if run is None else f"runs/{Path(run).name}"


def main() -> None:
    """Parse, copy, say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("results", type=Path, help="where to keep it")
    parser.add_argument("--commit", help="where the run could not know its commit, or was made from several")
    parser.add_argument(
        "--gpu-minutes", type=float, required=True, help="the run's share of the GPU, where several had it together"
    )
    parser.add_argument("--network", action="store_true", help="keep the finished network, in half precision")
    options = parser.parse_args()
    kept = record(**vars(options))
    print(f"recorded: {kept}")


if __name__ == "__main__":
    main()
