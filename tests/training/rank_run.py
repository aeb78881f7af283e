"""One rank of some runs: `python -m torch.distributed.run --nproc-per-node 2 rank_run.py FOLDER`. Run by test_ranks."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import small_networks  # type: ignore[import-not-found]  # beside this script
import torch
import torch.distributed as dist
from torch import nn

from strucspars.training import stage
from strucspars.training.observer import Silence
from strucspars.training.pipeline import run_pipeline
from strucspars.training.recipe_reading import read_recipe
from strucspars.training.stage import RunInterrupted

RECIPE = Path(__file__).with_name("small_recipe.yaml")
RUNS = {
    "plain": ("model.name=small_networks:without_norm",),
    "stopped": ("model.name=small_networks:without_norm",),
    # Whatever has to be brought together by hand: statistics, averages, decisions.
    "rich": ("stage1.ema=0.8", "stage2.ema=0.8", "finetune.recalibrate_bn=true", "finetune.form=auto"),
}


class Witness(Silence):
    """Notes a digest of the network that is being trained, after every epoch."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.seeds: list[int] = []

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        self.digests.append(digest(small_networks.built[0]))
        self.seeds.append(torch.initial_seed())


def digest(model: nn.Module) -> str:
    content = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(content).hexdigest()


def failures(place: Path, rank: int) -> list[str]:
    """What every process hears where one of them fails: the first, because of the folder; the second, of its data."""
    # The folder is finished: another seed must not be taken for it.
    other = read_recipe(RECIPE, [*RUNS["plain"], "seed=9"])
    lost = read_recipe(RECIPE, ["data.name=cifar10", "data.root=/nowhere"] if rank == 1 else [])
    heard = []
    for recipe, name in ((other, "plain"), (lost, "lost")):
        try:
            run_pipeline(recipe, place / name)
        except (ValueError, OSError) as error:
            heard.append(str(error))
    return heard


def stopped_midway(place: Path, rank: int) -> str:
    """Stop in the middle of an epoch, then go on to the end."""
    stage.STEPS_BETWEEN_AGREEMENTS = 2
    recipe = read_recipe(RECIPE, RUNS["plain"])
    try:
        run_pipeline(recipe, place / "midway", should_stop=lambda: rank == 1)
    except RunInterrupted as stop:
        run_pipeline(recipe, place / "midway")
        return str(stop)
    return "not stopped"


def main(place: Path) -> None:
    rank = int(os.environ["RANK"])
    findings: dict[str, Any] = {}
    for name, options in RUNS.items():
        small_networks.built.clear()
        witness, recipe = Witness(), read_recipe(RECIPE, options)
        stopped = None
        if name == "stopped":
            try:
                # One process alone hears of it.
                run_pipeline(recipe, place / name, should_stop=lambda: rank == 1)
            except RunInterrupted as stop:
                stopped = str(stop)
            small_networks.built.clear()
        summary = run_pipeline(recipe, place / name, observer=witness).to_json()
        findings[name] = {"digests": witness.digests, "summary": summary, "stopped": stopped}
        findings[name]["seeds"] = witness.seeds
    findings["failures"] = failures(place, rank)
    findings["midway"] = stopped_midway(place, rank)
    (place / f"rank{rank}.json").write_text(json.dumps(findings))
    dist.barrier()
    # Now and then torch's background threads abort the process while things are torn down; the work is done.
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
