"""Networks of the golden tests, which recipes name as `golden_networks:NAME`; changing them changes all records."""

import torch
from torch import nn


def small(num_classes: int) -> nn.Sequential:
    """Three convolutions with batch norm."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    layers = [*block(3, 16), *block(16, 16), *block(16, 32)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes))


class Residual(nn.Module):
    """Two blocks with shortcuts, unequal widths, biases, strides, a depthwise layer and a classifier."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.expand = nn.Conv2d(16, 48, 1)
        self.norm = nn.BatchNorm2d(48)
        self.depthwise = nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.project = nn.Conv2d(48, 16, 3, padding=1, bias=False)
        self.wide = nn.Conv2d(16, 64, 3, stride=2, padding=1, bias=False)
        self.wide_norm = nn.BatchNorm2d(64)
        self.again = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images).relu()
        features = features + self.project(self.depthwise(self.norm(self.expand(features)).relu()))
        features = self.wide_norm(self.wide(features)).relu()
        features = (features + self.again(features)).relu()
        scores: torch.Tensor = self.head(features.mean(dim=(-2, -1)))
        return scores


def residual() -> Residual:
    """With seeded weights and batch-norm statistics that are no defaults, for evaluation."""
    generator = torch.Generator().manual_seed(7)
    model = Residual()
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if tensor.dim() > 1:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor[0].numel() ** 0.5)
            elif tensor.is_floating_point():
                is_scale = name.endswith(("norm.weight", "running_var"))
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + (0.5 if is_scale else -0.5))
    return model.eval()


def images(number: int = 4, *, side: int = 8) -> torch.Tensor:
    """The same ones every time."""
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(1))
