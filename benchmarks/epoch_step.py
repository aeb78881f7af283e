"""How long the decisions after an epoch take for a ResNet-50, on one CPU core.

    python benchmarks/epoch_step.py         # about half a minute

The weights change a little before every `end_epoch()`, as an epoch of training changes them.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torchvision
from environment import ROOT, describe

import strucspars as ss

WEIGHT_CHANGE = 0.02  # of each weight's deviation, between two epochs


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="epochs to time")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "epoch_step.json", help="where the JSON goes")
    options = parser.parse_args()
    environment = describe(("strucspars", "numpy", "scipy", "torch", "torchvision")) | {"threads": 1}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None)
    begin = time.perf_counter()
    sparsifier = ss.Sparsifier(model, ss.SparsifyConfig(target=0.5, epochs=100))
    cold_seconds = time.perf_counter() - begin
    seconds, churns = [], []
    for _ in range(options.epochs):
        with torch.no_grad():
            for layer in sparsifier.selection.layers:
                layer.weight.add_(torch.randn_like(layer.weight), alpha=WEIGHT_CHANGE * float(layer.weight.std()))
        report = sparsifier.end_epoch()
        seconds.append(report.seconds)
        churns.append(statistics.mean(layer.churn for layer in report.layers))
    results = {
        "construction_seconds": cold_seconds,
        "end_epoch_seconds": {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)},
        "mean_churn": statistics.mean(churns),
    }
    settings = {"epochs": options.epochs, "weight_change": WEIGHT_CHANGE}
    text = json.dumps({"environment": environment, "settings": settings, "resnet50": results}, indent=2) + "\n"
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
