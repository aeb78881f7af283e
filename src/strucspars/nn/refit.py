"""Fitting the weight of a layer to wanted outputs: input patches, their second moments, the ridge solution."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from strucspars.nn.layers import DENSE_AND_GROUPED_TYPES, channel_orders, channels, groups_of_weight, is_grouped

# Of the mean square of the inputs. Smaller values fit a few hundred images better than the images that come later.
RIDGES = (1e-2, 0.1, 1.0)
# Of a group's inputs, relative to the mean over all groups.
SMALLEST_SQUARE = 1e-5
# Per layer, to fit to.
MAX_SAMPLES = 65_536


def can_be_refitted(module: nn.Module) -> bool:
    """Whether this is a convolution or linear layer, dense or grouped, whose weight is an ordinary parameter."""
    weight = module._parameters.get("weight")
    plain = type(module) in DENSE_AND_GROUPED_TYPES and "forward" not in vars(module)
    return plain and weight is not None and weight.is_floating_point() and weight.numel() > 0


@dataclass(frozen=True, eq=False)
class Blocks:
    """The output channels `rows` (G, C_out / G) and input channels `columns` (G, C_in / G) that each group connects."""

    rows: torch.Tensor
    columns: torch.Tensor

    @staticmethod
    def of(module: nn.Module) -> "Blocks":
        """The groups that a layer has: its own, or one."""
        weight = module.get_parameter("weight")
        out_channels, in_channels = channels(module)
        rows, columns = (torch.arange(width, device=weight.device) for width in (out_channels, in_channels))
        if is_grouped(module):
            orders = channel_orders(module)
            rows, columns = orders["out_inverse"].argsort(), orders["in_perm"]
        groups = groups_of_weight(module)
        return Blocks(rows.view(groups, -1), columns.view(groups, -1))

    def of_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight `(C_out, C_in / G, *kernel)` as `(G, C_out / G, C_in / G * kernel)`."""
        return weight[self.rows].flatten(2)

    def as_weight(self, blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The inverse of `of_weight`."""
        weight = blocks.new_empty(shape[0], blocks.shape[2])
        weight[self.rows.flatten()] = blocks.flatten(0, 1)
        return weight.view(shape)


def windows(module: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What each output position of a layer sees, a view `(batch, *positions, C_in, *kernel)`; and the positions."""
    if isinstance(module, nn.Linear):
        seen = inputs.reshape(len(inputs) if inputs.dim() > 1 else 1, -1, inputs.shape[-1])
        return seen, (seen.shape[1],)
    layer = cast(nn.Conv2d, module)
    axes = len(layer.kernel_size)
    if inputs.dim() == axes + 1:
        inputs = inputs[None]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    seen = functional.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    for axis in range(axes):
        reach = (layer.kernel_size[axis] - 1) * layer.dilation[axis] + 1
        seen = seen.unfold(axis + 2, reach, layer.stride[axis])[..., :: layer.dilation[axis]]
    return seen.movedim(1, 1 + axes), tuple(seen.shape[2 : 2 + axes])


def by_position(module: nn.Module, outputs: torch.Tensor) -> torch.Tensor:
    """The outputs of a layer as `(batch, positions, C_out)`."""
    if isinstance(module, nn.Linear):
        return outputs.reshape(len(outputs) if outputs.dim() > 1 else 1, -1, outputs.shape[-1])
    if outputs.dim() == len(cast(nn.Conv2d, module).kernel_size) + 1:
        outputs = outputs[None]
    return outputs.flatten(2).transpose(1, 2)


class PatchMoments:
    """Second moments of a layer's input patches, and of the patches with wanted outputs, over batches."""

    def __init__(self, module: nn.Module, *, max_positions: int | None = None) -> None:
        """Start with no data; at most `max_positions` positions of every image are looked at."""
        self.blocks = Blocks.of(module)
        self._module, self._max_positions = module, max_positions
        self._generator = torch.Generator().manual_seed(0)
        # Of the first batch. Single precision would lose a small variance beside a large mean.
        self._center: Sample | None = None
        # By whether they are held out.
        self._sums: dict[bool, _Sums] = {}
        # Sums of the images' means over all positions: inputs `(G, width)`, targets `(G, rows)`.
        self._count, self._means = 0, (torch.zeros(()), torch.zeros(()))

    @torch.no_grad()
    def add(self, inputs: torch.Tensor, targets: torch.Tensor | None = None, *, held_out: bool = False) -> None:
        """Take in what the layer reads, and the outputs that it should give, unless only the inputs matter.

        The batches that are held out decide how the others are fitted.
        """
        seen, shape = windows(self._module, inputs)
        positions = math.prod(shape)
        chosen = torch.arange(positions)
        if self._max_positions is not None and self._max_positions < positions:
            chosen = torch.randperm(positions, generator=self._generator)[: self._max_positions]
        chosen = chosen.to(seen.device)
        places: tuple[slice | torch.Tensor, ...] = (slice(None), *torch.unravel_index(chosen, shape))
        means = self._patches(seen.mean(tuple(range(1, 1 + len(shape))))[:, None])
        patches = self._patches(seen[places])
        wanted_means, wanted = means[..., :0], patches[..., :0]
        if targets is not None:
            outputs = by_position(self._module, targets)
            wanted_means, wanted = self._outputs(outputs.mean(1, keepdim=True)), self._outputs(outputs[:, chosen])
        if self._center is None:
            self._center = means.mean(1, keepdim=True), wanted_means.mean(1, keepdim=True)
        center, target_center = self._center
        self._count += means.shape[1]
        inputs_mean, targets_mean = self._means
        self._means = (
            inputs_mean + in_double((means - center).sum(1)),
            targets_mean + in_double((wanted_means - target_center).sum(1)),
        )
        self._sums[held_out] = _Sums.of((patches - center, wanted - target_center), self._sums.get(held_out))

    def _patches(self, seen: torch.Tensor) -> torch.Tensor:
        """`(batch, positions, C_in, *kernel)` to `(G, samples, width of a group)`."""
        patches = seen.reshape(seen.shape[0] * seen.shape[1], seen.shape[2], -1)
        return patches[:, self.blocks.columns].flatten(2).transpose(0, 1).float()

    def _outputs(self, wanted: torch.Tensor) -> torch.Tensor:
        """`(..., C_out)` to `(G, samples, C_out / G)`."""
        return wanted.reshape(-1, wanted.shape[-1])[:, self.blocks.rows].transpose(0, 1).float()

    def _mean(self, place: int) -> torch.Tensor:
        """Mean of the inputs (0) or targets (1) over all images and positions, in double precision."""
        assert self._center is not None, "read before anything was added"
        return in_double(self._center[place][:, 0]) + self._means[place] / self._count

    @property
    def mean_input(self) -> torch.Tensor:
        """Mean of the patches, `(G, width)`, in double precision."""
        return self._mean(0)

    @property
    def target_mean(self) -> torch.Tensor:
        """Mean of the wanted outputs, `(C_out,)`, in double precision."""
        return self._by_row(self._mean(1))

    def output_mean(self, weight: torch.Tensor) -> torch.Tensor:
        """Mean over images and positions of what a weight makes of the inputs, `(C_out,)`."""
        mean = self._mean(0)
        return self._by_row((self.blocks.of_weight(weight).to(mean) @ mean[:, :, None])[:, :, 0])

    def _by_row(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(values.flatten()).index_copy_(0, self.blocks.rows.flatten(), values.flatten())

    def moments(self, *parts: bool, has_bias: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """The second moments of the inputs `(G, width, width)`, and of targets and inputs.

        Of the parts of the data that are held out, or not; without a bias about zero, instead of about the mean.
        """
        covariance, cross = _Sums.total(self._sums[part] for part in parts if part in self._sums).central()
        if not has_bias:
            mean = self._mean(0)[:, None]
            covariance = covariance + mean.mT @ mean
            cross = cross + self._mean(1)[:, :, None] @ mean
        return covariance, cross

    def fitted(self, weight: torch.Tensor, *, ridge: float | None = None, has_bias: bool = True) -> torch.Tensor:
        """The weight that reproduces the wanted outputs best, near the given weight where the data are silent.

        With a bias, that is up to constants. What is held out decides how strong the ridge is, unless it is given.
        """
        start = self.blocks.of_weight(weight).to(self._mean(0))
        if ridge is None:
            ridge = RIDGES[0] if len(self._sums) < 2 else self._best_ridge(start, has_bias)
        moments = self.moments(False, True, has_bias=has_bias)
        return self.blocks.as_weight(ridge_solution(*moments, start, ridge=ridge), weight.shape)

    def _best_ridge(self, start: torch.Tensor, has_bias: bool) -> float:
        """The one whose fit to the other images does best on those that are held out."""
        seen, (covariance, cross) = (self.moments(part, has_bias=has_bias) for part in (False, True))

        def error(ridge: float) -> float:
            blocks = ridge_solution(*seen, start, ridge=ridge)
            return float(((blocks @ covariance - 2 * cross) * blocks).sum())

        return min(RIDGES, key=error)


# Inputs `(G, samples, width)` and targets `(G, samples, rows)`.
Sample = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over samples: how many they are, inputs, targets, products of inputs, and of targets and inputs."""

    count: int
    inputs: torch.Tensor
    targets: torch.Tensor
    second: torch.Tensor
    cross: torch.Tensor

    @staticmethod
    def of(sample: Sample, before: "_Sums | None" = None) -> "_Sums":
        """The sums of a sample, added to those of before, whose tensors are used again."""
        inputs, targets = sample
        if before is None:
            sums = inputs.sum(1), targets.sum(1), inputs.mT @ inputs, targets.mT @ inputs
            return _Sums(inputs.shape[1], *sums)
        return _Sums(
            before.count + inputs.shape[1],
            before.inputs.add_(inputs.sum(1)),
            before.targets.add_(targets.sum(1)),
            before.second.baddbmm_(inputs.mT, inputs),
            before.cross.baddbmm_(targets.mT, inputs),
        )

    @staticmethod
    def total(parts: Iterable["_Sums"]) -> "_Sums":
        """The sums over all parts."""
        first, *others = parts
        for each in others:
            sums = (getattr(first, name.name) + getattr(each, name.name) for name in fields(_Sums))
            first = _Sums(*sums)
        return first

    def central(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Covariance of the inputs, and of targets and inputs, in double precision."""
        mean, target_mean = in_double(self.inputs) / self.count, in_double(self.targets) / self.count
        second, cross = in_double(self.second) / self.count, in_double(self.cross) / self.count
        return (
            second.baddbmm_(mean[:, :, None], mean[:, None], alpha=-1),
            cross.baddbmm_(target_mean[:, :, None], mean[:, None], alpha=-1),
        )


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """In double precision, on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def ridge_solution(
    covariance: torch.Tensor, cross: torch.Tensor, weight: torch.Tensor, *, ridge: float
) -> torch.Tensor:
    """`(B + l W0) (A + l I)^-1`, the weights of least squared error that are drawn towards W0.

    Args:
        covariance: A of the inputs, `(..., n, n)`.
        cross: B of wanted outputs and inputs, `(..., rows, n)`.
        weight: W0, `(..., rows, n)`.
        ridge: l as a fraction of the mean of A's diagonal.

    >>> inputs, weight = torch.eye(3).double(), torch.tensor([[1.0, 2.0, 3.0]]).double()
    >>> ridge_solution(inputs, weight @ inputs, torch.zeros(1, 3).double(), ridge=1.0)
    tensor([[0.5000, 1.0000, 1.5000]], dtype=torch.float64)
    """
    mean_square = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)
    # The inputs of a group may be constant: what rounding leaves of their variance is no scale.
    floor = (SMALLEST_SQUARE * mean_square.mean()).clamp_min(torch.finfo(torch.float32).tiny)
    strength = ridge * mean_square.clamp_min(floor)[..., None, None]
    pulled = covariance + strength * torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    factor = torch.linalg.cholesky(pulled)
    return torch.cholesky_solve((cross + strength * weight).mT, factor).mT
