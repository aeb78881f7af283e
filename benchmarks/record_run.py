"""Keep a finished run as a result: what is needed to check and repeat it, and nothing of the machine it ran on.

    python benchmarks/record_run.py runs/cifar10-resnet20-40 results/cifar10 --gpu-minutes 3.0

Copies plan, metrics, summary and environment, the recipe without the places of data and other runs, the finished
network and the one after the first stage, from which other finetunings can start. A network that is too large for one
file is kept in parts, which `cat model.safetensors.part-* > model.safetensors` puts together again. Of a run that waits
for more time on a GPU, `--unfinished` keeps the checkpoint with which it goes on.
"""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

from strucspars.train.recipe import Recipe
from strucspars.train.recipe_identity import without_place
from strucspars.train.recipe_reading import read_recipe, recipe_yaml
from strucspars.train.run_folder import RunFolder

SMALL_FILES = ("plan.json", "selection.json", "metrics.jsonl", "summary.json", "decisions.json")
NETWORKS = ("model.safetensors", "checkpoints/sparsified.pt")
CHECKPOINT = "checkpoints/last.pt"
LARGEST_FILE_BYTES = 2_000_000


def record(
    run: Path, results: Path, *, gpu_minutes: float, commit: str | None = None, unfinished: bool = False
) -> Path:
    """Copy a finished run, or one to go on with, into the results; returns its folder there."""
    source, target = RunFolder(run), RunFolder(results / run.name)
    if source.summary_json_path.is_file() == unfinished:
        word, has = ("an unfinished", "a") if unfinished else ("a finished", "no")
        raise ValueError(f"{run} is not {word} run: it has {has} {source.summary_json_path.name}")
    if unfinished and not (run / CHECKPOINT).is_file():
        raise ValueError(f"{run} has no {CHECKPOINT} to go on with")
    for name in (*SMALL_FILES, *NETWORKS, *([CHECKPOINT] if unfinished else [])):
        if (run / name).is_file():
            _keep(run / name, target.path / name)
    target.write_recipe(recipe_yaml(_anywhere(read_recipe(source.recipe_path))))
    environment = json.loads(source.environment_path.read_text())
    if commit is not None:
        environment["commit"] = commit
        for each in environment.get("earlier", []):
            each["commit"] = each["commit"] or commit
    environment["gpu_minutes"] = gpu_minutes
    target.write_json(target.environment_path, environment)
    return target.path


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


def _keep(source: Path, target: Path) -> None:
    """Copy a file, in as many parts as its size asks for."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for former in (target, *target.parent.glob(f"{target.name}.part-*")):
        former.unlink(missing_ok=True)
    if source.stat().st_size <= LARGEST_FILE_BYTES:
        shutil.copyfile(source, target)
        return
    content = source.read_bytes()
    for number, start in enumerate(range(0, len(content), LARGEST_FILE_BYTES)):
        part = target.with_name(f"{target.name}.part-{number:02}")
        part.write_bytes(content[start : start + LARGEST_FILE_BYTES])


def main() -> None:
    """Parse, copy, say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("results", type=Path, help="where to keep it")
    parser.add_argument("--commit", help="where the run could not know its commit, or was made from several")
    parser.add_argument(
        "--gpu-minutes",
        type=float,
        required=True,
        help="the run's share of the GPU, where several had it together; of one that was recorded unfinished, the rest",
    )
    parser.add_argument("--unfinished", action="store_true", help="to be gone on with: keep its last checkpoint")
    options = parser.parse_args()
    kept = record(**vars(options))
    print(f"recorded: {kept}")


if __name__ == "__main__":
    main()
