"""What int8 costs in accuracy: finished networks of CIFAR-10, and trained ImageNet networks, as float32 and int8 files.

    python benchmarks/int8_accuracy.py cifar10 ~/cifar10 results/cifar10/cifar10-resnet20-40 ...
    python benchmarks/int8_accuracy.py imagenet ~/calibration ~/validation networks:resnet50 networks:mobilenet_v2 ...

The networks of CIFAR-10 are recorded runs, calibrated on images that they learned from and scored on the 10,000 test
images. ImageNet networks are functions that build a trained network; they are calibrated with photos of one folder and
scored on those of another, in folders named by the numbers of their classes. A number after the function compresses the
network without training first, by this target: networks:resnet50@0.2. Both ONNX Runtime and OpenVINO run all images.
Results are added to those of earlier calls.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from environment import ROOT, describe
from torch import nn

import strucspars as ss
from strucspars.core.plan import Preprocessing
from strucspars.data.folder import calibration_images
from strucspars.export.int8 import Int8, Int8TooInaccurate
from strucspars.models.catalogue import build_model
from strucspars.train.deploy import LabelledImages, labelled_batches
from strucspars.train.recipe import EngineRecipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run import Run
from strucspars.train.run_folder import RunFolder

OUT = ROOT / "results" / "int8" / "accuracy.json"
PACKAGES = ("torch", "onnx", "onnxruntime", "openvino")
IMAGES = 300
# Of the calibrated compression.
COMPRESSION_IMAGES = 256
SUFFIXES = {"onnx": ".onnx", "openvino": ".xml"}
# Points; where more is lost, layers are left in float32.
MAX_DROP = {"cifar10": 0.3, "imagenet": 1.0}
PREPROCESSING = {"efficientnet": Preprocessing(mean=(127 / 255,) * 3, std=(128 / 255,) * 3, size=224, resize=256)}


def measured(
    name: str, model: nn.Module, options: Int8, example: torch.Tensor, formats: list[str]
) -> Iterator[dict[str, Any]]:
    """The accuracy of the files of a network."""
    for format in formats:
        row = {"network": name, "format": format, "max_drop": options.max_drop}
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/network{SUFFIXES[format]}"
            try:
                report = ss.export(model, path, example_inputs=example, format=format, quantize=options)
            except Int8TooInaccurate as error:
                yield row | {"error": str(error)}
                continue
        assert report.int8 is not None
        yield row | {"nbytes": report.nbytes, "drop": report.int8.drop, **asdict(report.int8)}


@lru_cache(maxsize=1)
def photos(folder: str, preprocessing: Preprocessing) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All labelled photos, read once for networks that want them prepared in the same way: three gigabytes."""
    return list(LabelledImages(labelled_batches(folder, preprocessing, num_classes=1000)))


def cifar10(data: str, runs: list[str], formats: list[str]) -> Iterator[dict[str, Any]]:
    """Recorded runs."""
    for path in map(Path, runs):
        folder = RunFolder(path)
        recipe = replace(read_recipe(folder.recipe_path, [f"data.root={data}"]), engine=EngineRecipe(device="cpu"))
        run = Run(recipe, folder)
        model = ss.load(folder.model_path, run.fresh_model()).eval()
        options = Int8(run.calibration_images(IMAGES), labelled=LabelledImages(run.test), max_drop=MAX_DROP["cifar10"])
        yield from measured(path.name, model, options, torch.randn(2, 3, 32, 32), formats)


def imagenet(calibration: str, validation: str, functions: list[str], formats: list[str]) -> Iterator[dict[str, Any]]:
    """Networks of functions."""
    for name in functions:
        function, _, target = name.partition("@")
        model = build_model(function, num_classes=1000, must_classify=False).eval()
        known = next((each for key, each in PREPROCESSING.items() if key in name), Preprocessing())
        images = calibration_images(Path(calibration), known, count=IMAGES)
        if target:
            small = calibration_images(Path(calibration), known, count=COMPRESSION_IMAGES, seed=1)
            ss.compress(model, float(target), calibration=list(torch.split(small, 32)))
        options = Int8([images], labelled=photos(validation, known), max_drop=MAX_DROP["imagenet"])
        yield from measured(name.partition(":")[2], model, options, torch.randn(2, 3, 224, 224), formats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="data", required=True)
    for_cifar10, for_imagenet = commands.add_parser("cifar10"), commands.add_parser("imagenet")
    for_cifar10.add_argument("root")
    for_cifar10.add_argument("networks", nargs="+")
    for_imagenet.add_argument("calibration")
    for_imagenet.add_argument("validation")
    for_imagenet.add_argument("networks", nargs="+")
    for command in (for_cifar10, for_imagenet):
        command.add_argument("--formats", default="onnx,openvino")
    asked = parser.parse_args()
    formats = asked.formats.split(",")
    if asked.data == "cifar10":
        found = cifar10(asked.root, asked.networks, formats)
    else:
        found = imagenet(asked.calibration, asked.validation, asked.networks, formats)
    for row in found:
        kept = json.loads(OUT.read_text())["rows"] if OUT.is_file() else []
        key = [asked.data, row["network"], row["format"]]
        kept = [each for each in kept if [each["data"], each["network"], each["format"]] != key]
        # The folders of the data name this machine.
        said = f"python benchmarks/int8_accuracy.py {asked.data} ... {row['network']} --formats {row['format']}"
        entry = {"data": asked.data, **row, "environment": describe(PACKAGES) | {"command": said}}
        print(entry, flush=True)
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps({"rows": [*kept, entry]}, indent=1) + "\n")
