"""What shared channel orders keep of the weights, how long they take to learn, and what they do to accuracy.

    python benchmarks/order_policies.py weights networks:resnet50 networks:mobilenet_v2   # `package:function`
    python benchmarks/order_policies.py training CIFAR10 --runs 3                         # minutes per run on one core

`weights` takes networks with trained weights, and a ResNet-50 with independent random ones: the mean over the layers of
the norm that 2, 4 and 8 groups keep, the threshold at which 30 % of all parameters go, and the processor time of a cold
start and of a refresh after 1 % noise on the weights, in one thread. `training` trains the recorded dense ResNet-20 on
10,000 images of CIFAR-10 with the structured penalty, converts it and finetunes it, by policy; the norms are then those
of sparse-trained weights; recorded runs are not repeated. Rows are added to results/order_policies.json, the page is
written beside it.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from environment import ROOT, describe
from over_runs import measured_rows, read_sittings, with_sitting
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.core.hierarchy import num_groups
from strucspars.core.importance import kept_norm_by_level
from strucspars.core.registry import import_named
from strucspars.cost.text_table import Column, markdown_table
from strucspars.data.cifar import CIFAR10, read_cifar
from strucspars.models.catalogue import build_model
from strucspars.nn.groupable import Selection
from strucspars.nn.importance import importance_matrix
from strucspars.sparsify.orders import with_network_orders
from strucspars.sparsify.planning import LayerState, learned_states, network_size, plan_at_levels

OUT = ROOT / "results" / "order_policies.json"
POLICIES = [("free", 1), ("shared", 1), ("one-shuffle", 1), ("shared", 8), ("one-shuffle", 8)]
LEVELS = (2, 3, 4)
# Within reach of MobileNetV2, whose classifier stays.
WEIGHTS_TARGET = 0.3
NOISE = 0.01

# Of the training: a rate that this network can be finetuned with, and the target where shuffles matter.
TARGET = 0.6
EPOCHS, STEPS, BATCH, RATE = 10, 100, 32, 0.01
TRAIN_IMAGES, TEST_IMAGES = 10_000, 10_000
SEEDS = (0, 1, 2)


def policy_name(orders: str, pieces: int) -> str:
    """How a row calls a policy."""
    return orders if pieces == 1 else f"{orders}, pieces of {pieces}"


def training_name(orders: str, pieces: int, seed: int) -> str:
    """The name of a training's row."""
    return f"training {policy_name(orders, pieces)} {seed}"


def kept_norms(selection: Selection, states: Sequence[LayerState], model: nn.Module, config: ss.SparsifyConfig) -> Any:
    """The mean share of the norm that all layers keep at each level, with the orders refined for it."""
    size, kept = network_size(model, None), {}
    for level in LEVELS:
        levels = {layer.name: min(level, layer.largest_level) for layer in selection.layers}
        plan = plan_at_levels(selection, states, size, config, levels)
        shares = []
        for layer in selection.layers:
            planned, importance = plan.layers[layer.name], importance_matrix(layer.weight)
            permuted = importance[planned.out_perm][:, planned.in_perm]
            shares.append(float(kept_norm_by_level(permuted)[levels[layer.name] - 1]))
        kept[str(num_groups(level))] = round(statistics.mean(shares), 4)
    return kept


def weights_row(name: str, model: nn.Module, side: int, orders: str, pieces: int) -> dict[str, Any]:
    """What one policy keeps of the weights of one network; nothing where the network cannot be traced."""
    config = ss.SparsifyConfig(target=0.0, orders=orders, pieces=pieces)
    example = torch.zeros(1, 3, side, side)
    selection = with_network_orders(ss.select_layers(model, config), model, config, example)
    if selection.orders is None and (orders, pieces) != POLICIES[0]:
        return {}
    begin = time.process_time()
    states = learned_states(selection.layers, config, None, network=selection.orders)
    cold = time.process_time() - begin
    kept = kept_norms(selection, states, model, config)
    plan = ss.one_shot_plan(
        model, ss.SparsifyConfig(target=WEIGHTS_TARGET, orders=orders, pieces=pieces), example_inputs=example
    )
    before = [layer.weight.detach().clone() for layer in selection.layers]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer, weight in zip(selection.layers, before, strict=True):
            layer.weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=generator))
        begin = time.process_time()
        learned_states(selection.layers, config, states, network=selection.orders)
        refresh = time.process_time() - begin
        for layer, weight in zip(selection.layers, before, strict=True):
            layer.weight.copy_(weight)
    return {
        "run": f"{name} {policy_name(orders, pieces)}",
        "network": name,
        "policy": policy_name(orders, pieces),
        "kept_norm": kept,
        "min_kept_norm": round(plan.min_kept_norm or 0.0, 4),
        "cold_seconds": round(cold, 2),
        "refresh_seconds": round(refresh, 2),
    }


def random_resnet50() -> nn.Module:
    """Independent normal weights."""
    torch.manual_seed(0)
    return build_model("resnet50", num_classes=1000, image_shape=(3, 64, 64)).eval()


def measure_weights(names: Sequence[str]) -> list[dict[str, Any]]:
    """All rows of the networks."""
    rows = []
    for name in ["random resnet50", *names]:
        model = random_resnet50() if name == "random resnet50" else import_named("network", name)().eval()
        # Tracing needs an image, and its size does not matter to the norms.
        for orders, pieces in POLICIES:
            row = weights_row(name.partition(":")[2] or name, model, 64, orders, pieces)
            print(json.dumps(row), flush=True)
            rows += [row] if row else []
    return rows


class Training:
    """The recorded dense network, and images to train it on and to score it with."""

    def __init__(self, root: Path) -> None:
        data = read_cifar(root, CIFAR10)
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (CIFAR10.mean, CIFAR10.std))
        self.images = (data.train.images[:TRAIN_IMAGES].float() / 255 - mean) / deviation
        self.labels = data.train.labels[:TRAIN_IMAGES]
        self.test_images = (data.test.images[:TEST_IMAGES].float() / 255 - mean) / deviation
        self.test_labels = data.test.labels[:TEST_IMAGES]
        self.generator = torch.Generator()

    @staticmethod
    def network() -> nn.Module:
        """ResNet-20 with bottlenecks, 91.3 % on all test images."""
        model = build_model("preact-resnet20", num_classes=10, image_shape=(3, 32, 32))
        return ss.load(ROOT / "results" / "cifar10" / "cifar10-resnet20-dense" / "model.safetensors", model)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """One step on images drawn with replacement, flipped and shifted."""
        drawn = torch.randint(TRAIN_IMAGES, (BATCH,), generator=self.generator)
        flip = torch.rand(BATCH, 1, 1, 1, generator=self.generator) < 0.5
        down, right = torch.randint(0, 9, (2,), generator=self.generator).tolist()
        images = functional.pad(torch.where(flip, self.images[drawn].flip(3), self.images[drawn]), (4, 4, 4, 4))
        optimizer.zero_grad()
        images = images[:, :, down : down + 32, right : right + 32]
        torch.autograd.backward(functional.cross_entropy(model.train()(images), self.labels[drawn]))
        optimizer.step()

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Percentage of the test images."""
        model.eval()
        right = sum(
            int((model(images).argmax(1) == labels).sum())
            for images, labels in zip(
                torch.split(self.test_images, 100), torch.split(self.test_labels, 100), strict=True
            )
        )
        return round(100 * right / TEST_IMAGES, 2)

    def row(self, orders: str, pieces: int, seed: int) -> dict[str, Any]:
        """Sparse training, conversion and finetuning."""
        self.generator.manual_seed(seed)
        model, example = self.network(), self.images[:1]
        config = ss.SparsifyConfig(target=TARGET, epochs=EPOCHS, orders=orders, pieces=pieces, seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
        sparsifier = ss.Sparsifier(model, config, example_inputs=example).attach(optimizer)
        for _ in range(EPOCHS):
            for _ in range(STEPS):
                self.step(model, optimizer)
            report = sparsifier.end_epoch()
        plan = sparsifier.plan()
        ss.convert_(model, plan)
        converted = self.accuracy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS)
        for _ in range(EPOCHS * STEPS):
            self.step(model, optimizer)
            schedule.step()
        folded = ss.fold_report(ss.fold(model, example))
        return {
            "run": training_name(orders, pieces, seed),
            "policy": policy_name(orders, pieces),
            "seed": seed,
            "removed": round(plan.removed_param_fraction, 4),
            "kept_norm": round(report.kept_norm, 4),
            "gathers": None if folded is None else len(folded.gathers),
            "converted": converted,
            "finetuned": self.accuracy(model),
        }


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def weights_table(rows: Sequence[dict[str, Any]]) -> str:
    """What the policies keep of weights, and how long that takes."""
    names = [policy_name(*policy) for policy in POLICIES]
    solved = sorted(
        (row for row in rows if "network" in row), key=lambda row: (row["network"], names.index(row["policy"]))
    )
    columns = [
        Column("weights", [row["network"] for row in solved], is_text=True),
        Column("orders", [row["policy"] for row in solved], is_text=True),
        *(Column(f"{groups} groups", [f"{row['kept_norm'][groups]:.3f}" for row in solved]) for groups in "248"),
        Column("threshold at 30 %", [f"{row['min_kept_norm']:.3f}" for row in solved]),
        Column("cold s", [f"{row['cold_seconds']:.2f}" for row in solved]),
        Column("refresh s", [f"{row['refresh_seconds']:.2f}" for row in solved]),
    ]
    return markdown_table(columns)


def norms_table(rows: Sequence[dict[str, Any]]) -> str:
    """The share of the norm that 4 groups keep, by policy and network."""
    kept = {(row["network"], row["policy"]): row["kept_norm"]["4"] for row in rows if "network" in row}
    names = [policy_name(*policy) for policy in POLICIES]
    # One that cannot be traced has free orders only.
    networks = [network for network in dict.fromkeys(name for name, _ in kept) if (network, names[1]) in kept]
    columns = [Column("norm that 4 groups keep", names, is_text=True)]
    columns += [Column(network, [f"{kept[network, name]:.3f}" for name in names]) for network in networks]
    return markdown_table(columns)


def training_table(rows: Sequence[dict[str, Any]]) -> str:
    """What the policies do to a short training."""
    names = [policy_name(*policy) for policy in POLICIES]
    trained = {name: [row for row in rows if "seed" in row and row["policy"] == name] for name in names}
    trained = {name: each for name, each in trained.items() if each}
    columns = [
        Column("orders", list(trained), is_text=True),
        Column("runs", [str(len(each)) for each in trained.values()]),
        Column("kept norm", [spread([row["kept_norm"] for row in each]) for each in trained.values()]),
        Column("shuffles left", ["/".join(sorted({str(row["gathers"]) for row in each})) for each in trained.values()]),
        Column("converted", [spread([row["converted"] for row in each]) for each in trained.values()]),
        Column("finetuned", [spread([row["finetuned"] for row in each]) for each in trained.values()]),
    ]
    return markdown_table(columns)


def markdown(path: Path) -> str:
    """The page: both tables, and where they are from."""
    rows = measured_rows(path)
    lines = [
        f"- `{each['environment']['command']}` (commit {each['environment']['commit']}), "
        f"{each['environment']['hardware']['cpu']}, one core"
        for each in read_sittings(path)
    ]
    origin = "\n".join(dict.fromkeys(lines))
    return f"""# Shared channel orders

`benchmarks/order_policies.py` writes this page from [order_policies.json](order_policies.json).

## What they keep of the weights

The mean over the layers of the norm that 2, 4 and 8 groups keep, each with orders refined for it; the threshold on the
kept norm at which 30 % of all parameters go; seconds of processor time in one thread, for orders from scratch and after
a change of the weights by 1 %. One run each; the solver is deterministic. With free orders every layer is solved alone.
Networks with free orders only cannot be traced.

{weights_table(rows)}

## What they do to accuracy

The recorded dense ResNet-20 (bottlenecks, 91.3 %) loses {100 * TARGET:.0f} % of its parameters in {EPOCHS} x {STEPS}
steps of sparse training with batches of {BATCH} out of {TRAIN_IMAGES:,} images of CIFAR-10, then as many of finetuning.
*Kept norm* is the threshold at the end of sparse training; accuracies in percent of all test images, mean and
deviation over seeds. Six passes over these images end far below what the paper's schedule reaches: the table shows what
the policies cost a short training, not what is left of that after a long one.

{training_table(rows)}

{origin}
"""


def main() -> None:
    """Measure, add, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("weights").add_argument("networks", nargs="*", help="package:function")
    trainings = kinds.add_parser("training")
    trainings.add_argument("data", type=Path, help="folder that holds cifar-10-batches-py")
    trainings.add_argument("--runs", type=int, help="how many of the runs that are not recorded yet; all by default")
    kinds.add_parser("page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("strucspars").addHandler(logging.NullHandler())

    def record(rows: list[dict[str, Any]], command: str) -> None:
        environment = describe(("strucspars", "numpy", "torch")) | {
            "command": f"python benchmarks/order_policies.py {command}"
        }
        sittings = with_sitting(read_sittings(OUT), {"environment": environment, "rows": rows})
        OUT.write_text(json.dumps({"sittings": sittings}, indent=1) + "\n")

    if options.kind == "weights":
        record(measure_weights(options.networks), " ".join(["weights", *options.networks]))
    elif options.kind == "training":
        done = {row["run"] for row in measured_rows(OUT)}
        # One seed of every policy before the next seed, and pieces, which matter to GPU kernels, after the others.
        wanted = sorted(((*policy, seed) for seed in SEEDS for policy in POLICIES), key=lambda each: each[1])
        missing = [each for each in wanted if training_name(*each) not in done]
        training, rows = Training(options.data), []
        for each in missing[: options.runs]:
            rows.append(training.row(*each))
            print(json.dumps(rows[-1]), flush=True)
            record(rows, "training CIFAR10")
    OUT.with_suffix(".md").write_text(markdown(OUT))


if __name__ == "__main__":
    main()
