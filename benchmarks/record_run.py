"""Keep a finished run as a result: what is needed to check and repeat it, and nothing of the machine it ran on.

    python benchmarks/record_run.py runs/cifar10-resnet20-40 results/cifar10

Copies plan, metrics, summary and environment, the recipe without the place of the data, and the network after the first
stage, from which other finetunings can start.
"""

import argparse
import json
import shutil
from pathlib import Path

from strucspars.runs.folder import RunFolder
from strucspars.training.recipe_identity import without_place
from strucspars.training.recipe_reading import read_recipe, recipe_yaml


def record(run: Path, results: Path, *, commit: str | None = None) -> Path:
    """Copy a finished run into the results; returns its folder there."""
    source, target = RunFolder(run), RunFolder(results / run.name)
    if not source.summary_json_path.is_file():
        raise ValueError(f"{run} is not a finished run: it has no {source.summary_json_path.name}")
    target.checkpoints.mkdir(parents=True, exist_ok=True)
    for name in ("plan.json", "metrics.jsonl", "summary.json", "decisions.json", "checkpoints/sparsified.pt"):
        if (run / name).is_file():
            shutil.copyfile(run / name, target.path / name)
    target.write_recipe(recipe_yaml(without_place(read_recipe(source.recipe_path))))
    environment = json.loads(source.environment_path.read_text())
    if commit is not None:
        environment["commit"] = commit
    target.write_json(target.environment_path, environment)
    return target.path


def main() -> None:
    """Parse, copy, say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run folder")
    parser.add_argument("results", type=Path, help="where to keep it")
    parser.add_argument("--commit", help="where the run could not know its commit, or was made from several")
    options = parser.parse_args()
    print(f"recorded: {record(options.run, options.results, commit=options.commit)}")


if __name__ == "__main__":
    main()
