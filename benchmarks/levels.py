"""One threshold for all layers against a knapsack of their kept norms, on trained networks, without finetuning.

    python benchmarks/levels.py ~/cifar10 results/cifar10/cifar10-resnet{20-dense,56-dense-seed2}

Groups a recorded dense network at some targets, recomputes its batch-norm statistics over 1,024 training images, and
scores it on all test images. On the CPU, some 10 minutes for both networks. Writes results/levels.json and a table,
results/levels.md.
"""

import argparse
import copy
import itertools
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from environment import ROOT, describe

from strucspars.convert.compress import recalibrate_
from strucspars.convert.conversion import convert_
from strucspars.cost.text_table import Column, markdown_table, percent
from strucspars.models.weights import load_weights_
from strucspars.nn.groupable import select_layers
from strucspars.sparsify.config import Levels, SparsifyConfig
from strucspars.sparsify.one_shot import one_shot_plan
from strucspars.sparsify.planning import kept_fraction
from strucspars.train.epochs import Evaluation
from strucspars.train.recipe import EngineRecipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run import Run
from strucspars.train.run_folder import RunFolder

BUDGETS, TARGETS = ("params", "macs"), (0.2, 0.35, 0.5)
LEVELS: tuple[Levels, ...] = ("threshold", "knapsack")
IMAGES = 1024
OUT = ROOT / "results" / "levels.json"
PAGE = """# Group levels by a threshold and by a knapsack

`benchmarks/levels.py` writes this page from [levels.json](levels.json). Recorded dense networks on CIFAR-10, grouped
without training; statistics of the batch norms recomputed over 1,024 training images; top-1 on the 10,000 test images.
*Kept norm* is the share of all layers' norm. One run each: both choices are deterministic.

{table}

- `{command}` (commit {commit}), {cpu}{note}
"""


def rows_of(folder: RunFolder, data: str) -> list[dict[str, Any]]:
    """The network of a run at every budget, target and choice of levels."""
    recipe = read_recipe(folder.recipe_path, [f"data.root={data}"])
    run = Run(replace(recipe, engine=EngineRecipe(device="cpu", cuda_graph=False)), folder)
    dense = run.fresh_model()
    load_weights_(dense, str(folder.model_path), recipe.model.name)
    images = [batch.images.clone() for batch in itertools.islice(run.train.epoch(1), math.ceil(IMAGES / 64))]
    found = []
    for budget, target, levels in itertools.product(BUDGETS, TARGETS, LEVELS):
        config = SparsifyConfig(target=target, budget=budget, levels=levels)
        plan = one_shot_plan(dense, config, example_inputs=run.example)
        small = convert_(copy.deepcopy(dense), plan)
        recalibrate_(small, images)
        row = {
            "run": folder.path.name,
            "budget": budget,
            "target": target,
            "levels": levels,
            "removed_params": plan.removed_param_fraction,
            "removed_macs": plan.removed_mac_fraction,
            "kept_norm": kept_fraction(select_layers(dense).layers, plan),
            "top1": Evaluation(run.engine, small, run.test).accuracy().top1,
        }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line per budget and target, both choices side by side."""
    pairs = [rows[place : place + 2] for place in range(0, len(rows), 2)]
    names = ("removed_params", "removed_macs", "kept_norm", "top1")
    columns = [
        Column("network", [pair[0]["run"] for pair in pairs], is_text=True),
        Column("target", [f"{pair[0]['target']:.0%} of all {pair[0]['budget']}" for pair in pairs], is_text=True),
    ]
    for name in names:
        for side, levels in enumerate(LEVELS):
            columns.append(Column(f"{name.replace('_', ' ')}, {levels}", [percent(pair[side][name]) for pair in pairs]))
    return markdown_table(columns)


def page() -> str:
    """The page of what was measured."""
    document = json.loads(OUT.read_text())
    known = document["environment"]
    return PAGE.format(
        table=table(document["rows"]),
        command=known["command"],
        commit=known["commit"],
        cpu=known["hardware"]["cpu"],
        note=f"; {known['note']}" if "note" in known else "",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of CIFAR-10")
    parser.add_argument("runs", nargs="+", type=Path, help="recorded dense runs")
    arguments = parser.parse_args()
    logging.getLogger("strucspars").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    known: Any = describe(("torch", "scipy"))
    known["command"] = known["command"].replace(arguments.data, "~/cifar10")
    for path in arguments.runs:
        # Rows of other networks stay.
        before = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
        rows = [row for row in before if row["run"] != path.name] + rows_of(RunFolder(path), arguments.data)
        OUT.write_text(json.dumps({"environment": known, "rows": rows}, indent=1) + "\n")
        OUT.with_suffix(".md").write_text(page())
