"""Networks put together at random."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import strucspars as ss

NUM_STEPS = 14
MAX_WIDTH = 48


def layer(width: int, generator: np.random.Generator, *, converted: bool = True) -> nn.Module:
    """A layer for this number of channels, of one of many kinds; some change the number."""
    groups = int(generator.choice([number for number in (1, 2, 3, 4, 8) if width % number == 0]))
    out_width = int(generator.choice([width, groups * int(generator.integers(1, 5))]))
    grouped = ss.ShuffledGroupConv2d(width, out_width, 1, groups=groups, bias=bool(generator.integers(2)))
    grouped.in_perm.copy_(torch.from_numpy(generator.permutation(width)))
    grouped.out_inverse.copy_(torch.from_numpy(generator.permutation(out_width)))
    kinds: list[nn.Module] = [
        *[grouped if converted else nn.Conv2d(width, out_width, 1)] * 5,
        nn.Conv2d(width, out_width, 3, padding=1),
        nn.Conv2d(width, out_width, 1, groups=groups),
        nn.Conv2d(width, width, 3, padding=1, groups=width),
        nn.BatchNorm2d(width),
        nn.PReLU(width),
        nn.GroupNorm(1, width),
        nn.GroupNorm(groups, width),
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.Softmax2d(),
    ]
    return kinds[generator.integers(len(kinds))]


class RandomNetwork(nn.Module):
    """Steps that each make new tensors of earlier ones: a layer, a sum, a product, a cut, a concatenation, padding."""

    def __init__(self, seed: int, *, converted: bool = True) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, int, int]] = []
        self.in_channels = int(generator.integers(4, 17))
        self.cuts: list[list[int]] = []
        widths = [self.in_channels]
        for _ in range(NUM_STEPS):
            # Late tensors more often: otherwise most of the network is dead ends.
            one, other = (len(widths) - 1 - int(generator.integers(min(len(widths), 4))) for _ in range(2))
            alike = [place for place, width in enumerate(widths) if width == widths[one] and place != one]
            choices = ["layer", "layer", "layer", "sum", "sum", "gate", "cut", "concatenation", "pad"]
            operation = str(generator.choice(choices))
            if operation in ("sum", "gate") and alike:
                widths.append(widths[one])
                other = alike[-1]
            elif operation == "cut" and widths[one] > 1:
                first = int(generator.integers(1, widths[one]))
                other = len(self.cuts)
                self.cuts.append([first, widths[one] - first])
                widths += self.cuts[-1]
            elif operation == "concatenation" and widths[one] + widths[other] <= MAX_WIDTH:
                widths.append(widths[one] + widths[other])
            elif operation == "pad" and widths[one] + 3 <= MAX_WIDTH:
                widths.append(widths[one] + 3)
            else:
                operation, other = "layer", len(self.layers)
                self.layers.append(layer(widths[one], generator, converted=converted))
                widths.append(self.layers[-1](torch.zeros(2, widths[one], 4, 4)).shape[1])
            self.steps.append((operation, one, other))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = [images]
        for operation, one, other in self.steps:
            if operation == "layer":
                tensors.append(functional.relu(self.layers[other](tensors[one])))
            elif operation == "sum":
                tensors.append(tensors[one] - 0.5 * tensors[other])
            elif operation == "gate":
                tensors.append(tensors[one] * tensors[other].mean((2, 3), keepdim=True).sigmoid())
            elif operation == "cut":
                parts = torch.split(tensors[one], self.cuts[other], dim=1)
                tensors += [parts[0], parts[1]]
            elif operation == "concatenation":
                tensors.append(torch.cat([tensors[one], tensors[other]], dim=1))
            else:
                tensors.append(functional.pad(tensors[one], (0, 0, 0, 0, 1, 2), value=0.3))
        return tensors[-1], tensors[-2].mean((2, 3))


def random_scales_(model: nn.Module) -> None:
    """Random biases, scales and statistics: with zeros and ones, wrong orders go unnoticed."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.5, 1.5)
