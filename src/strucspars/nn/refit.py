"""Fitting the weight of a layer to wanted outputs: input patches, their second moments, the ridge solution."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from strucspars.nn.layers import DENSE_AND_GROUPED_TYPES, channel_orders, channels, groups_of_weight, is_grouped

# Of the mean square of the inputs. Smaller values fit a few hundred images better than the images that come later.
RIDGES = (1e-2, 0.1, 1.0)
# Of the measured coherence, how much a fit may follow.
COHERENCE_SHARES = (0.0, 0.1)
# Of a group's inputs, relative to the mean over all groups.
SMALLEST_SQUARE = 1e-5
# Per layer. More neighbouring positions of the same images tell little new.
MAX_SAMPLES = 32_768


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
    """Second moments of a layer's input patches, and of the patches with wanted outputs, over batches.

    What the layer is to reproduce is weighed as the network reads it. `coherence` is the correlation that the
    gradients of the network's loss have between two positions of an image: where all positions pull alike, as before
    a global pooling, only the error of their mean counts, and with 0 every position counts for itself.
    """

    def __init__(self, module: nn.Module, *, coherence: float = 0.0, max_positions: int | None = None) -> None:
        """Start with no data; at most `max_positions` positions of every image are looked at."""
        self.blocks = Blocks.of(module)
        self._module, self._coherence, self._max_positions = module, coherence, max_positions
        self._generator = torch.Generator().manual_seed(0)
        self._center: Sample | None = None
        # By whether they are held out. A mean has a sample per image, which are few; positions are many.
        self._positions: dict[bool, _Sums] = {}
        self._means: dict[bool, list[Sample]] = {False: [], True: []}

    @torch.no_grad()
    def add(self, inputs: torch.Tensor, targets: torch.Tensor | None = None, *, held_out: bool = False) -> None:
        """Take in what the layer reads, and the outputs that it should give, unless only the inputs matter.

        The batches that are held out decide how the others are fitted.
        """
        seen, shape = windows(self._module, inputs)
        self._num_positions = math.prod(shape)
        chosen = torch.arange(self._num_positions)
        if self._max_positions is not None and self._max_positions < self._num_positions:
            chosen = torch.randperm(self._num_positions, generator=self._generator)[: self._max_positions]
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
        # Single precision would lose a small variance beside a large mean.
        center, target_center = self._center
        self._means[held_out].append((means - center, wanted_means - target_center))
        sample = patches - center, wanted - target_center
        self._positions[held_out] = _Sums.of(sample, self._positions.get(held_out))

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
        samples = torch.cat([each[place] for part in self._means.values() for each in part], 1)
        return in_double(self._center[place][:, 0]) + in_double(samples).mean(1)

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

    def moments(self, coherence: float, *parts: bool, has_bias: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """The second moments of the inputs `(G, width, width)`, and of targets and inputs, for this coherence.

        Of the parts of the data that are held out, or not; without a bias about zero, instead of about the mean.
        """
        covariance, cross = _Sums.total(self._positions[part] for part in parts if part in self._positions).central()
        if coherence > 0:
            samples = [each for part in parts for each in self._means[part]]
            of_means = _Sums.of(
                (torch.cat([x for x, _ in samples], 1), torch.cat([t for _, t in samples], 1))
            ).central()
            weights = 1 - coherence, coherence * self._num_positions
            covariance = weights[0] * covariance + weights[1] * of_means[0]
            cross = weights[0] * cross + weights[1] * of_means[1]
        if not has_bias:
            weight, mean = 1 - coherence + coherence * self._num_positions, self._mean(0)[:, None]
            covariance = covariance + weight * mean.mT @ mean
            cross = cross + weight * self._mean(1)[:, :, None] @ mean
        return covariance, cross

    def fitted(self, weight: torch.Tensor, *, ridge: float | None = None, has_bias: bool = True) -> torch.Tensor:
        """The weight that reproduces the wanted outputs best, near the given weight where the data are silent.

        With a bias, that is up to constants. What is held out decides, as far as it is open, how strong the ridge is,
        and how far the fit follows the coherence: few images have few means.
        """
        start = self.blocks.of_weight(weight).to(self._mean(0))
        ridges = RIDGES if ridge is None else (ridge,)
        choices = [(share * self._coherence, each) for share in COHERENCE_SHARES for each in ridges]
        chosen = choices[0] if len(self._positions) < 2 else self._best(choices, start, has_bias)
        self.chosen = chosen
        moments = self.moments(chosen[0], False, True, has_bias=has_bias)
        return self.blocks.as_weight(ridge_solution(*moments, start, ridge=chosen[1]), weight.shape)

    def _best(self, choices: Iterable[tuple[float, float]], start: torch.Tensor, has_bias: bool) -> tuple[float, float]:
        """The coherence and ridge whose fit to the other images does best on those that are held out."""
        covariance, cross = self.moments(self._coherence, True, has_bias=has_bias)
        errors = {}
        for coherence, ridges in itertools.groupby(choices, key=itemgetter(0)):
            seen = self.moments(coherence, False, has_bias=has_bias)
            for _, ridge in ridges:
                blocks = ridge_solution(*seen, start, ridge=ridge)
                errors[coherence, ridge] = float(((blocks @ covariance - 2 * cross) * blocks).sum())
        return min(errors, key=errors.__getitem__)


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
