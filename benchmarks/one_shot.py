"""What calibrated one-shot compression keeps of an ImageNet network's accuracy, without any training.

    python benchmarks/one_shot.py --model package:function --calibration PHOTOS --validation FOLDER --target 0.1 0.2

The network is what the function returns, in eval mode. PHOTOS is a folder of images; FOLDER has one folder of images
for every class, by its number. Resized to 256, cut to 224 x 224. The accuracy is that of ONNX Runtime, whose file is
compared with PyTorch. On the CPU; the planning of a network and each of its targets take minutes.
"""

import argparse
import copy
import json
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from environment import ROOT, describe
from over_runs import read_sittings, with_sitting
from PIL import Image
from torch import nn

import strucspars as ss
from strucspars.core.registry import import_named
from strucspars.sparsify.calibration import Calibration, device_of, ignore_progress
from strucspars.sparsify.one_shot import MeasuredLayers, measured_layers, plan_by_loss
from strucspars.sparsify.planning import network_size

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH_SIZE = 25


def image(path: Path) -> torch.Tensor:
    """A photo as the networks expect it."""
    photo = Image.open(path).convert("RGB")
    scale = 256 / min(photo.size)
    photo = photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.Resampling.BILINEAR)
    left, top = (photo.width - 224) // 2, (photo.height - 224) // 2
    pixels = np.asarray(photo.crop((left, top, left + 224, top + 224)), dtype=np.float32) / 255
    return ((torch.from_numpy(pixels) - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(2, 0, 1)


def batches(paths: Sequence[Path]) -> Iterator[torch.Tensor]:
    """The photos, a few at a time: thousands of them do not fit into memory."""
    for start in range(0, len(paths), BATCH_SIZE):
        yield torch.stack([image(path) for path in paths[start : start + BATCH_SIZE]])


def predictions(model: nn.Module, paths: Sequence[Path]) -> list[int]:
    """The class of every photo, by ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        ss.export(model, path, example_inputs=torch.stack([image(each) for each in paths[:BATCH_SIZE]]))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        outputs = [session.run(None, {name: each.numpy()})[0] for each in batches(paths)]
    return [int(label) for each in outputs for label in each.argmax(1)]


def compressed(
    dense: nn.Module, measured: MeasuredLayers, config: ss.SparsifyConfig, calibration: Calibration
) -> tuple[nn.Module, dict[str, Any]]:
    """What `ss.compress` makes of a copy of the network, and what that took, from a planning that several share."""
    model, start = copy.deepcopy(dense), time.perf_counter()
    size = network_size(model, calibration.images[0][:1])
    plan = plan_by_loss(ss.select_layers(model, config), measured, size, config)
    ss.compress(model, plan, calibration=calibration)
    row = {
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "removed_params": plan.removed_param_fraction,
        "removed_macs": plan.removed_mac_fraction,
        "predicted_divergence": plan.predicted_divergence,
    }
    return model, row


def table(sittings: Sequence[dict[str, Any]]) -> str:
    """The rows of all sittings as a table of the documentation."""
    header = ("network", "removed: params, MACs", "images", "top-1", "dense", "photos", "divergence", "minutes")
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    for row in (row for each in sittings for row in each["rows"]):
        cells = (
            row["network"],
            f"{row['removed_params']:.1%}, {row['removed_macs']:.1%}",
            row["images"],
            f"{row['top1']:.1%}",
            f"{row['dense_top1']:.1%}",
            f"{row['validation']:,}",
            f"{row['predicted_divergence']:.3f}",
            f"{row['planning_minutes']}, {row['minutes']}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the rows beside those of other networks and targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="package:function that returns the trained network")
    parser.add_argument("--calibration", type=Path, required=True, help="folder of photos")
    parser.add_argument("--images", type=int, default=256, help="how many of them")
    parser.add_argument("--validation", type=Path, required=True, help="a folder for every class, by number")
    parser.add_argument("--every", type=int, default=1, help="score on every so many of the photos")
    parser.add_argument("--target", type=float, nargs="+", required=True)
    parser.add_argument("--budget", default="params")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "one_shot.json")
    options = parser.parse_args()
    dense = import_named("--model", options.model)()
    photos = sorted(options.calibration.iterdir())
    photos = [photos[place] for place in np.random.default_rng(0).permutation(len(photos))[: options.images]]
    calibration = Calibration.of(batches(photos)).on(device_of(dense))
    held = sorted((int(path.parent.name), path) for path in options.validation.glob("*/*"))
    held = held[:: options.every]
    labels, paths = [label for label, _ in held], [path for _, path in held]

    def top1(model: nn.Module) -> float:
        return sum(map(int.__eq__, predictions(model, paths), labels)) / len(labels)

    environment = describe(("torch", "torchvision", "onnxruntime"))
    environment["command"] = (
        f"python benchmarks/one_shot.py --model {options.model} --calibration PHOTOS --images {options.images} "
        f"--validation FOLDER --every {options.every} --target {' '.join(map(str, options.target))} "
        f"--budget {options.budget}"
    )
    configs = [ss.SparsifyConfig(target=target, budget=options.budget) for target in options.target]
    start, selection = time.perf_counter(), ss.select_layers(dense, configs[0])
    measured = measured_layers(dense, selection, configs[0], calibration, ignore_progress)
    planning_minutes = round((time.perf_counter() - start) / 60, 1)
    network, rows, dense_top1 = options.model.partition(":")[2], [], top1(dense)
    for config in configs:
        model, row = compressed(dense, measured, config, calibration)
        # In KiB on Linux.
        row["peak_memory_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 1)
        row |= {"planning_minutes": planning_minutes, "images": len(calibration)}
        row |= {"validation": len(paths), "dense_top1": dense_top1, "top1": top1(model)}
        name = f"{network} {config.target:g} {config.budget} {len(calibration)}"
        rows.append({"run": name, "network": network, "target": config.target, "budget": config.budget, **row})
        print(json.dumps(rows[-1]), flush=True)
        sittings = with_sitting(read_sittings(options.out), {"environment": environment, "rows": rows})
        options.out.write_text(json.dumps({"sittings": sittings}, indent=2) + "\n")


if __name__ == "__main__":
    main()
