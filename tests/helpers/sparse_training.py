"""A small network in sparse training, and what its penalty should be."""

import torch
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.core.hierarchy import penalty_matrix
from strucspars.core.importance import Norm
from strucspars.nn.importance import importance_matrix
from strucspars.sparsify.reports import EpochReport

CONFIG = ss.SparsifyConfig(target=0.4, epochs=8, controller="paper", lambda_step=1e-3, lambda_warmup=1 / 8)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 16, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def sparsifier_with_penalty(model: nn.Module, config: ss.SparsifyConfig = CONFIG) -> ss.Sparsifier:
    """After two epochs lambda is above zero."""
    sparsifier = ss.Sparsifier(model, config)
    sparsifier.end_epoch()
    sparsifier.end_epoch()
    assert sparsifier.lambda_value > 0
    return sparsifier


def penalty_by_definition(model: nn.Module, sparsifier: ss.Sparsifier, norm: Norm) -> float:
    """Sec. 3.3, layer by layer: lambda * sum(S[P][:, Q] * R_g)."""
    state = sparsifier.state_dict()
    total = 0.0
    for name, layer in state["layers"].items():
        importance = importance_matrix(model.get_parameter(f"{name}.weight"), norm)
        permuted = importance[layer["out_perm"].numpy()][:, layer["in_perm"].numpy()]
        out_channels, in_channels = importance.shape
        total += float((permuted * penalty_matrix(out_channels, in_channels, layer["group_level"])).sum())
    return sparsifier.lambda_value * total


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def labelled_images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 3, 8, 8, generator=generator), torch.randint(4, (32,), generator=generator)


def train(model: nn.Module, sparsifier: ss.Sparsifier, epochs: int) -> list[EpochReport]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = labelled_images()
    reports = []
    for _ in range(epochs):
        for _ in range(5):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(images), labels))
            sparsifier.regularize_()
            optimizer.step()
        reports.append(sparsifier.end_epoch())
    return reports
