"""Whether a finished network, converted, saved, loaded and exported, still says what the masked one says.

    python benchmarks/deployed_accuracy.py ~/cifar10 results/cifar10/cifar10-resnet20-40

Rebuilds the masked dense network of every run from its saved weights and its plan, converts that anew, writes and reads
the file, exports it, runs the ONNX file in ONNX Runtime on all test images, and counts equal predictions. All of it in
full precision on the CPU.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import ROOT
from over_runs import measure_runs
from torch import nn

import strucspars as ss
from strucspars.core.checks import IntArray
from strucspars.nn.layers import dense_weight
from strucspars.train.outcome import read_summary
from strucspars.train.recipe import EngineRecipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run import Run
from strucspars.train.run_folder import RunFolder

BATCH = 250


def masked_network(run: Run, path: Path) -> nn.Module:
    """The dense network with zeros that computes the same as a file of group convolutions."""
    converted, dense = ss.load(path, run.fresh_model()), run.fresh_model()
    plan = ss.model_plan(converted)
    state = converted.state_dict()
    for name, layer in plan.layers.items():
        if layer.num_groups > 1:
            state[f"{name}.weight"] = dense_weight(state[f"{name}.weight"], layer)
    wanted = dense.state_dict()
    dense.load_state_dict({name: state[name] for name in wanted})
    return dense.eval()


def test_images(run: Run) -> tuple[torch.Tensor, IntArray]:
    """All test images, normalised, and their labels."""
    batches = list(run.test.epoch(0))
    valid = torch.cat([batch.valid for batch in batches])
    images = torch.cat([batch.images for batch in batches])[valid]
    return images, torch.cat([batch.labels for batch in batches])[valid].numpy()


@torch.inference_mode()
def predictions(model: nn.Module, images: torch.Tensor) -> IntArray:
    """The best guess for every image."""
    return np.concatenate([model(part).argmax(dim=1).numpy() for part in torch.split(images, BATCH)])


def deployed(path: Path, data: str) -> dict[str, Any]:
    """One run's network on all test images: masked, converted and in ONNX Runtime."""
    folder = RunFolder(path)
    summary, plan = read_summary(folder), folder.load_plan()
    if summary is None or plan is None:
        raise ValueError(f"{path} is no finished run with a plan")
    recipe = replace(read_recipe(folder.recipe_path, [f"data.root={data}"]), engine=EngineRecipe(device="cpu"))
    run = Run(recipe, folder)
    images, labels = test_images(run)
    masked = masked_network(run, folder.model_path)
    said = {"masked": predictions(masked, images)}
    with tempfile.TemporaryDirectory() as place:
        converted = ss.convert_(masked_network(run, folder.model_path), plan)
        ss.save(converted, f"{place}/network.safetensors", plan=plan)
        loaded = ss.load(f"{place}/network.safetensors", run.fresh_model()).eval()
        said["converted"] = predictions(loaded, images)
        report = ss.export(loaded, f"{place}/network.onnx", example_inputs=images[:2])
        (scores,) = ss.OnnxRunner(report.path)(images.numpy())
        said["onnxruntime"] = scores.argmax(axis=1)
    return {
        "run": path.name,
        "images": len(images),
        "params": summary.params.after,
        "grouped_layers": sum(layer.num_groups > 1 for layer in plan.layers.values()),
        "gathers": report.num_gathers,
        "top1": {form: float((guesses == labels).mean()) for form, guesses in said.items()},
        "recorded_top1": summary.converted_top1,
        "equal_to_masked": {form: int((guesses == said["masked"]).sum()) for form, guesses in said.items()},
    }


if __name__ == "__main__":
    measure_runs(
        deployed, text=__doc__, packages=("torch", "onnxruntime"), out=ROOT / "results" / "cifar10_deployed.json"
    )
