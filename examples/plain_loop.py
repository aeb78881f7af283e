"""Sparse training in a plain loop, from a dense network to a small file, in less than a minute on one core.

    python examples/plain_loop.py --target 0.6 --out small.safetensors

The data are made here: noisy images of stripes, in four directions and two widths, at a random place. The two lines
that sparse training adds to a loop are marked with "added".
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import strucspars as ss

CLASSES, SIZE, BATCH = 8, 16, 64
TRAIN_IMAGES, TEST_IMAGES = 2048, 1024
LR, MOMENTUM = 0.02, 0.9


def stripes(count: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images `(count, 3, SIZE, SIZE)` of stripes in noise, and their classes: direction and width of the stripes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = (labels % 4) * math.pi / 4
    frequency = 2 * math.pi / torch.where(labels < 4, 4.0, 7.0)
    phase = 2 * math.pi * torch.rand(count, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = angle.cos()[:, None, None] * rows + angle.sin()[:, None, None] * columns
    waves = torch.sin(frequency[:, None, None] * along + phase[:, None, None])
    noise = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return waves[:, None] + 4.0 * noise, labels


def network() -> nn.Sequential:
    """A small convolutional network; nothing in it knows of groups."""

    def block(in_channels: int, out_channels: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]

    layers = [*block(3, 16, 1), *block(16, 32, 2), *block(32, 32, 1), *block(32, 64, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The training images in an order of the epoch's own."""
    images, labels = stripes(TRAIN_IMAGES, seed=0)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for batch in torch.split(order, BATCH):
        yield images[batch], labels[batch]


def train_sparse(model: nn.Module, config: ss.SparsifyConfig) -> ss.GroupingPlan:
    """An ordinary training loop with two lines more."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=1e-4)
    sparsifier = ss.Sparsifier(model, config).attach(optimizer)  # added
    for epoch in range(config.epochs):
        model.train()
        for images, labels in batches(epoch):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
        report = sparsifier.end_epoch()  # added
        print(f"epoch {report.epoch:2}  lambda {report.lambda_value:.5f}  groups remove {report.removed_fraction:.1%}")
    return sparsifier.plan()


def finetune(model: nn.Module, epochs: int) -> None:
    """The same loop without them: a converted network is an ordinary network."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        model.train()
        for images, labels in batches(epoch):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of the test images that the model gets right."""
    images, labels = stripes(TEST_IMAGES, seed=1)
    right = model.eval()(images).argmax(dim=1) == labels
    return int(right.sum()) / len(labels)


def num_params(model: nn.Module) -> int:
    """Parameters of the whole network."""
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Train, plan, convert, finetune, save; then tell what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="of sparse training; half as many for finetuning")
    parser.add_argument("--target", type=float, default=0.6, help="fraction of all parameters to remove")
    parser.add_argument("--out", type=Path, default=Path("small.safetensors"), help="file to write")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = network()
    plan = train_sparse(model, ss.SparsifyConfig(target=options.target, epochs=options.epochs))
    rows = [("dense, sparsified", num_params(model), accuracy(model))]
    ss.convert_(model, plan)
    rows.append(("converted", num_params(model), accuracy(model)))
    finetune(model, max(1, options.epochs // 2))
    rows.append(("finetuned", num_params(model), accuracy(model)))
    ss.save(model, options.out)

    print(f"\n{'stage':<18} {'parameters':>10} {'accuracy':>9}")
    for stage, params, right in rows:
        print(f"{stage:<18} {params:>10,} {right:>9.1%}")
    print(f"\nwrote {options.out} ({options.out.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
