"""Networks put together at random: whatever meets whatever, folding keeps the function."""

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.cost.gathers import shuffles_in_pass

WIDTHS = (8, 16)
NUM_STEPS = 14


def shuffled(in_channels: int, out_channels: int, generator: np.random.Generator) -> nn.Module:
    groups = int(generator.choice([1, 2, 4, 8]))
    layer = ss.ShuffledGroupConv2d(in_channels, out_channels, 1, groups=groups, bias=bool(generator.integers(2)))
    layer.in_perm.copy_(torch.from_numpy(generator.permutation(in_channels)))
    layer.out_inverse.copy_(torch.from_numpy(generator.permutation(out_channels)))
    return layer


LAYERS: tuple[Callable[[int, int, np.random.Generator], nn.Module], ...] = (
    shuffled,
    shuffled,
    shuffled,
    lambda in_channels, out_channels, generator: nn.Conv2d(in_channels, out_channels, 3, padding=1),
    lambda in_channels, out_channels, generator: nn.Conv2d(in_channels, out_channels, 1, groups=4),
    lambda in_channels, out_channels, generator: nn.Conv2d(in_channels, in_channels, 3, padding=1, groups=in_channels),
    lambda in_channels, out_channels, generator: nn.BatchNorm2d(in_channels),
    lambda in_channels, out_channels, generator: nn.MaxPool2d(3, stride=1, padding=1),
    lambda in_channels, out_channels, generator: nn.Softmax2d(),
)


class RandomNetwork(nn.Module):
    """Steps that each make a new tensor of earlier ones: a layer, a sum, a product or a concatenation."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, int, int]] = []
        widths = [8]
        for _ in range(NUM_STEPS):
            # Late tensors more often: otherwise most of the network is dead ends.
            one, other = (len(widths) - 1 - int(generator.integers(min(len(widths), 4))) for _ in range(2))
            operation = str(generator.choice(["layer", "layer", "layer", "sum", "gate", "concatenation"]))
            if operation == "concatenation" and widths[one] + widths[other] > 64:
                operation = "layer"
            if operation in ("sum", "gate") and widths[one] != widths[other]:
                operation = "layer"
            if operation == "layer":
                layer = LAYERS[generator.integers(len(LAYERS))](widths[one], int(generator.choice(WIDTHS)), generator)
                other = len(self.layers)
                self.layers.append(layer)
                widths.append(layer(torch.zeros(2, widths[one], 4, 4)).shape[1])
            else:
                widths.append(widths[one] + (widths[other] if operation == "concatenation" else 0))
            self.steps.append((operation, one, other))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = [images]
        for operation, one, other in self.steps:
            if operation == "layer":
                tensors.append(functional.relu(self.layers[other](tensors[one])))
            elif operation == "sum":
                tensors.append(tensors[one] + 0.5 * tensors[other])
            elif operation == "gate":
                tensors.append(tensors[one] * tensors[other].mean((2, 3), keepdim=True).sigmoid())
            else:
                tensors.append(torch.cat([tensors[one], tensors[other]], dim=1))
        return tensors[-1], tensors[-2].mean((2, 3))


@settings(max_examples=60)
@given(st.integers(0, 100_000))
def test_folding_keeps_the_function_of_any_network(seed: int) -> None:
    torch.manual_seed(seed)
    model = RandomNetwork(seed).double()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.5, 1.5)
    model.eval()
    images = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    folded = ss.fold(model, images)
    assert ss.fold_report(folded).untraced_reason == ""
    with torch.no_grad():
        torch.testing.assert_close(folded(images), model(images))
        unfolded_bytes = sum(shuffle.nbytes for shuffle in shuffles_in_pass(model, (images,)))
    assert ss.fold_report(folded).gathered_bytes <= unfolded_bytes
