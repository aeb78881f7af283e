"""Sparse training by importances of the weights and of data, on the digits with the demo's network, on the CPU.

    python benchmarks/importances.py RUNS

RUNS is a folder for the runs, which resume there. Every importance gets the same recipe and seeds; those that read data
are measured with and without their factors of the penalty. `cut` is the accuracy after compression, before finetuning;
`top1` that of the last epoch.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import numpy as np
from environment import ROOT, describe

from strucspars.core.checks import FloatArray
from strucspars.io.files import write_text
from strucspars.train.outcome import read_metrics
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder

OUT = ROOT / "results" / "importances.json"
READ_DATA = ("activation", "fisher")
IMAGES = 256


def unscaled(importance: FloatArray) -> FloatArray:
    """Every connection alike, in place of `penalty_scale`."""
    return np.ones_like(importance)


def measured(importance: str, *, scaled: bool, target: float, seed: int, folder: Path) -> dict[str, Any]:
    """What one run came to."""
    overrides = [
        f"seed={seed}",
        f"sparsify.importance={importance}",
        f"sparsify.target={target}",
        *("sparsify.controller=auto", "sparsify.lambda_step=null"),
        f"sparsify.calibration={IMAGES if importance in READ_DATA else 0}",
    ]
    with nullcontext() if scaled else patch("strucspars.sparsify.planning.penalty_scale", unscaled):
        summary = run_pipeline(read_recipe("demo", overrides), folder)
    rows = [row for row in read_metrics(RunFolder(folder)) if row["stage"] == "sparsify"]
    return {
        "importance": importance,
        "scaled": scaled and importance in READ_DATA,
        "target": target,
        "seed": seed,
        "removed": round(summary.removed_param_fraction, 4),
        "removed_while_training": round(rows[-1]["removed_fraction"], 4),
        "sparse": summary.before_compression_top1,
        "cut": summary.compressed_top1,
        "top1": summary.finetuned.last_top1,
        "seconds": round(sum(summary.seconds.values())),
        "seconds_deciding": round(sum(row["solver_seconds"] for row in rows), 1),
    }


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and deviation over the seeds of every row of the table."""
    found: dict[tuple[str, bool, float], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["importance"], row["scaled"], row["target"]), []).append(row)
    return [
        {"importance": importance, "scaled": scaled, "target": target, "runs": len(of_seeds)}
        | {
            key: [mean(row[key] for row in of_seeds), stdev(row[key] for row in of_seeds) if len(of_seeds) > 1 else 0]
            for key in ("sparse", "cut", "top1", "seconds_deciding")
        }
        for (importance, scaled, target), of_seeds in found.items()
    ]


def main() -> None:
    """Measure, and write what is known so far after every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder for the runs")
    parser.add_argument("--targets", type=float, nargs="+", default=[0.75])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--importances", nargs="+", default=["l1", "l2", *READ_DATA])
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        for target in options.targets:
            for importance in options.importances:
                for scaled in (True, False) if importance in READ_DATA else (True,):
                    name = f"{importance}{'' if scaled else '-unscaled'}-{target:g}-{seed}"
                    rows.append(
                        measured(importance, scaled=scaled, target=target, seed=seed, folder=options.runs / name)
                    )
                    print(rows[-1], flush=True)
                    report = describe(("torch",)) | {"runs": rows, "means": means(rows)}
                    write_text(options.out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
