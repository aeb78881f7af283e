"""One rank of some runs: `python -m torch.distributed.run --nproc-per-node 2 rank_run.py FOLDER`. Run by test_ranks."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import small_networks  # type: ignore[import-not-found]  # beside this script
import torch
import torch.distributed as dist
from torch import nn

from strucspars.convert.compress import recalibrate_
from strucspars.train import run
from strucspars.train.observer import RunObserver
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run import RunInterrupted

RECIPE = Path(__file__).with_name("small_recipe.yaml")
RUNS = {
    "plain": ("model.name=small_networks:without_norm",),
    "stopped": ("model.name=small_networks:without_norm",),
    "dropout": ("model.name=small_networks:with_dropout", "stage1.ema=0.8"),
    # Whatever has to be brought together by hand: statistics, averages, decisions.
    "rich": ("stage1.ema=0.8", "stage2.ema=0.8", "finetune.recalibrate_bn=true", "finetune.form=auto"),
}


class Witness(RunObserver):
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


def stopped_midway(place: Path, name: str, rank: int) -> str:
    """Stop in the middle of an epoch, then go on to the end; a copy of the stopped run is left for others."""
    run.STEPS_BETWEEN_AGREEMENTS = 2
    recipe, path = read_recipe(RECIPE, RUNS[name]), place / f"{name}-midway"
    try:
        run_pipeline(recipe, path, should_stop=lambda: rank == 1)
    except RunInterrupted as stop:
        if rank == 0:
            shutil.copytree(path, place / f"{name}-left")
        run_pipeline(recipe, path)
        return str(stop)
    return "not stopped"


def recalibrated_statistics(rank: int) -> list[float]:
    """Mean and variance over the images of all processes: each has a mean of its own, and a small deviation."""
    mean = 8 + 0.002 * rank
    images = torch.full((4, 1, 8, 8), mean + 0.003)
    images[:, :, ::2] = mean - 0.003
    norm = nn.BatchNorm2d(1)
    recalibrate_(norm, [images])
    return [norm.get_buffer("running_mean").item(), norm.get_buffer("running_var").item()]


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
        summary = run_pipeline(recipe, place / name, observers=[witness]).to_json()
        findings[name] = {"digests": witness.digests, "summary": summary, "stopped": stopped}
        findings[name]["seeds"] = witness.seeds
    findings["midway"] = stopped_midway(place, "dropout", rank)
    findings["recalibrated"] = recalibrated_statistics(rank)
    (place / f"rank{rank}.json").write_text(json.dumps(findings))
    dist.barrier()
    # Now and then torch's background threads abort the process while things are torn down; the work is done.
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # As in the tests' own process.
    os.fsync = os.fstat  # type: ignore[assignment]
    main(Path(sys.argv[1]))
