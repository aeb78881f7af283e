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

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        self.digests.append(digest(small_networks.built[0]))


def digest(model: nn.Module) -> str:
    content = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(content).hexdigest()


def main(place: Path) -> None:
    rank = int(os.environ["RANK"])
    findings = {}
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
    (place / f"rank{rank}.json").write_text(json.dumps(findings))
    dist.barrier()
    # Now and then torch's background threads abort the process while things are torn down; the work is done.
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
