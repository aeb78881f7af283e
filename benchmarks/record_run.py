"""Keep a finished run as a result: what is needed to check and repeat it, and nothing of the machine it ran on.

    python benchmarks/record_run.py runs/cifar10-resnet20-40 results/cifar10 --gpu-minutes 3.0

Copies plan, metrics, summary and environment, the recipe without the place of the data, and where they are small the
finished network and the one after the first stage, from which other finetunings can start.
"""

import argparse
import json
import shutil
from pathlib import Path

from strucspars.runs.folder import RunFolder
from strucspars.training.recipe_identity import without_place
from strucspars.training.recipe_reading import read_recipe, recipe_yaml

SMALL_FILES = ("plan.json", "selection.json", "metrics.jsonl", "summary.json", "decisions.json")
NETWORKS = ("model.safetensors", "checkpoints/sparsified.pt")
LARGEST_NETWORK_BYTES = 2_000_000


def record(run: Path, results: Path, *, gpu_minutes: float, commit: str | None = None) -> Path:
    """Copy a finished run into the results; returns its folder there."""
    source, target = RunFolder(run), RunFolder(results / run.name)
    if not source.summary_json_path.is_file():
        raise ValueError(f"{run} is not a finished run: it has no {source.summary_json_path.name}")
    networks = [name for name in NETWORKS if (run / name).is_file()]
    networks = [name for name in networks if (run / name).stat().st_size <= LARGEST_NETWORK_BYTES]
    for name in (*(name for name in SMALL_FILES if (run / name).is_file()), *networks):
        (target.path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run / name, target.path / name)
    target.write_recipe(recipe_yaml(without_place(read_recipe(source.recipe_path))))
    environment = json.loads(source.environment_path.read_text())
    if commit is not None:
        environment["commit"] = commit
    environment["gpu_minutes"] = gpu_minutes
    target.write_json(target.environment_path, environment)
    return target.path


def main() -> None:
    """Parse, copy, say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run folder")
    parser.add_argument("results", type=Path, help="where to keep it")
    parser.add_argument("--commit", help="where the run could not know its commit, or was made from several")
    parser.add_argument(
        "--gpu-minutes", type=float, required=True, help="the run's share of the GPU, where several had it together"
    )
    options = parser.parse_args()
    kept = record(options.run, options.results, commit=options.commit, gpu_minutes=options.gpu_minutes)
    print(f"recorded: {kept}")


if __name__ == "__main__":
    main()
