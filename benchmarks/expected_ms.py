"""The milliseconds that plans expect against those that the exported files take.

    python benchmarks/expected_ms.py

For every network: the layers are timed anew, plans are made for some targets, and the dense and planned networks are
exported to ONNX and timed in turn; three times over. Random weights, one core; about 20 minutes on an idle machine.
Writes results/expected_ms.json and a table, results/expected_ms.md.
"""

import argparse
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from environment import ROOT, describe

from strucspars.bench.deployed import deployed_networks
from strucspars.bench.suite import TimingRules
from strucspars.convert.conversion import convert_
from strucspars.core.plan import GroupingPlan
from strucspars.cost.text_table import Column, markdown_table
from strucspars.models.catalogue import build_model
from strucspars.nn.names import copied
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.one_shot import one_shot_plans

NETWORKS = ("resnet18", "resnet50", "densenet121", "mobilenet_v2", "regnet_y_400mf")
TARGETS, ORDERS, RUNS = (0.15, 0.3, 0.5), "one-shuffle", 3
SHAPE = (3, 224, 224)
RULES = TimingRules(seconds=12.0, visit_seconds=0.2, max_calls=10, min_rounds=5, max_rounds=20)
OUT = ROOT / "results" / "expected_ms.json"
PAGE = """# Expected and measured milliseconds

`benchmarks/expected_ms.py` writes this page from [expected_ms.json](expected_ms.json). Networks with random weights at
224 x 224, batch 1, ONNX Runtime, one core, float32, order policy `{orders}`: plans with `budget="latency"`, and their
exported files. The layers are timed anew in each of three runs. *Off by* is expected over measured, the median of the
runs and their range. Targets without a row are out of reach of a network.

{table}

- `{command}` (commit {commit}), {cpu}{note}
"""


def rows_of(network: str) -> list[dict[str, Any]]:
    """Every target that a network can reach, in a run of its own."""
    torch.manual_seed(0)
    dense, example = build_model(network, num_classes=1000, image_shape=SHAPE).eval(), torch.zeros(1, *SHAPE)
    plans: dict[str, GroupingPlan] = {}
    begin = time.perf_counter()
    for target in TARGETS:
        config = SparsifyConfig(budget="latency", orders=ORDERS)
        try:
            plans[f"{target:g}"], *_ = one_shot_plans(dense, config, [target], example_inputs=example)
        except ValueError as error:
            print(f"{network}: {error}", flush=True)
    seconds = time.perf_counter() - begin
    models = {"dense": dense} | {name: convert_(copied(dense), plan) for name, plan in plans.items()}
    with tempfile.TemporaryDirectory() as folder:
        found = deployed_networks(
            {name: (model, Path(folder) / f"{name}.onnx") for name, model in models.items()},
            image_shape=SHAPE,
            rules=RULES,
        )
    rows = []
    for name, plan in plans.items():
        assert plan.latency is not None
        rows.append(
            {
                "network": network,
                "target": float(name),
                "planning_seconds": round(seconds, 1),
                "dense_expected_ms": plan.latency.dense_ms,
                "dense_ms": found.networks["dense"][0].ms,
                "expected_ms": plan.latency.expected_ms,
                "ms": found.networks[name][0].ms,
                "removed_params": plan.removed_param_fraction,
                "layers_without_gain": len(plan.latency.layers_without_gain),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line per network and target, medians over the runs."""
    runs: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault((row["network"], row["target"]), []).append(row)

    def median(name: str) -> list[str]:
        return [f"{statistics.median(row[name] for row in each):.2f}" for each in runs.values()]

    off = [sorted(row["expected_ms"] / row["ms"] - 1 for row in each) for each in runs.values()]
    spread = [f"{statistics.median(each):+.1%} ({each[0]:+.1%} to {each[-1]:+.1%})" for each in off]
    return markdown_table(
        [
            Column("network", [network for network, _ in runs], is_text=True),
            Column("target", [f"{target:.0%}" for _, target in runs]),
            Column("dense ms", median("dense_ms")),
            Column("expected ms", median("expected_ms")),
            Column("measured ms", median("ms")),
            Column("off by", spread),
            Column("runs", [str(len(each)) for each in runs.values()]),
        ]
    )


def page() -> str:
    """The page of what was measured."""
    document = json.loads(OUT.read_text())
    known = document["environment"]
    return PAGE.format(
        orders=ORDERS,
        table=table(document["rows"]),
        command=known["command"],
        commit=known["commit"],
        cpu=known["hardware"]["cpu"],
        note=f"; {known['note']}" if "note" in known else "",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true", help="measure only what the record lacks")
    arguments = parser.parse_args()
    logging.getLogger("strucspars").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    measured: list[dict[str, Any]] = json.loads(OUT.read_text())["rows"] if arguments.resume else []
    done = {(row["run"], row["network"]) for row in measured}
    for run, network in itertools.product(range(RUNS), NETWORKS):
        if (run, network) in done:
            continue
        with tempfile.TemporaryDirectory() as cache:
            os.environ["STRUCSPARS_CACHE"] = cache
            measured += [row | {"run": run} for row in rows_of(network)]
        environment = describe(("torch", "torchvision", "onnxruntime"))
        OUT.write_text(json.dumps({"environment": environment, "rows": measured}, indent=1) + "\n")
        OUT.with_suffix(".md").write_text(page())
