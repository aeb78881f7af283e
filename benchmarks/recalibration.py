"""What a compressed network is worth without any finetuning: after compression, and with its statistics recomputed.

    python benchmarks/recalibration.py ~/cifar10 results/cifar10/cifar10-resnet20-40*

Takes the network after the first stage and the plan of recorded runs; recomputes the batch-norm statistics of the
dense and of the masked network over one epoch of training images. On the CPU, in full precision; some minutes per run.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from environment import ROOT
from over_runs import measure_runs
from torch import nn

from strucspars.convert.compress import recalibrate_
from strucspars.train.checkpoint import load_named
from strucspars.train.epochs import Evaluation
from strucspars.train.outcome import read_summary
from strucspars.train.recipe import EngineRecipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.rules import HeldZerosRule
from strucspars.train.run import SPARSIFIED, Run
from strucspars.train.run_folder import RunFolder


def without_finetuning(path: Path, data: str) -> dict[str, Any]:
    """Accuracies of a run's network before and after compression, and recalibrated; and what finetuning made of it."""
    folder = RunFolder(path)
    summary, plan = read_summary(folder), folder.load_plan()
    saved = load_named(folder.checkpoints, SPARSIFIED)
    if summary is None or plan is None or saved is None:
        raise ValueError(f"{path} is no finished run that kept its network after the first stage")
    recipe = replace(read_recipe(folder.recipe_path, [f"data.root={data}"]), engine=EngineRecipe(device="cpu"))
    run = Run(recipe, folder)
    model = run.fresh_model()
    model.load_state_dict(saved["model"])

    def top1(network: nn.Module) -> float:
        return Evaluation(run.engine, network, run.test).accuracy().top1

    row: dict[str, Any] = {"run": path.name, "row": summary.name, "seed": summary.seed}
    row["before_top1"] = top1(model)
    # The dense network gains too: its statistics run behind weights that still move fast.
    recalibrated = copy.deepcopy(model)
    recalibrate_(recalibrated, (batch.images for batch in run.train.epoch(1)))
    row["before_recalibrated_top1"] = top1(recalibrated)
    HeldZerosRule(model, plan)
    row["compressed_top1"] = top1(model)
    recalibrate_(model, (batch.images for batch in run.train.epoch(1)))
    row["recalibrated_top1"] = top1(model)
    return row | {"finetuned_top1": summary.finetuned.last_top1}


if __name__ == "__main__":
    measure_runs(
        without_finetuning, text=__doc__, packages=("torch",), out=ROOT / "results" / "cifar10_recalibration.json"
    )
