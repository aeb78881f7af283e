"""Fitting the weight of a layer to wanted outputs: input patches, their second moments, the ridge solution."""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from strucspars.nn.layers import DENSE_AND_GROUPED_TYPES, channel_orders, channels, groups_of_weight, is_grouped

# Of the mean square of the inputs. Smaller values fit a few hundred images better than the images that come later.
RIDGE = 3e-3
# Per layer. More neighbouring positions of the same images tell little new.
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
        self.num_positions = 0
        self._positions = _Sums()
        self._images = _Sums()

    @torch.no_grad()
    def add(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> None:
        """Take in what the layer reads, and the outputs that it should give, unless only the inputs matter."""
        seen, shape = windows(self._module, inputs)
        self.num_positions = math.prod(shape)
        chosen = self._chosen().to(seen.device)
        places: tuple[slice | torch.Tensor, ...] = (slice(None), *torch.unravel_index(chosen, shape))
        sampled = seen[places]
        mean = seen.mean(tuple(range(1, 1 + len(shape))))[:, None]
        wanted = None if targets is None else by_position(self._module, targets)
        self._images.add(self._patches(mean), wanted if wanted is None else self._outputs(wanted.mean(1)))
        self._positions.add(self._patches(sampled), wanted if wanted is None else self._outputs(wanted[:, chosen]))

    def _chosen(self) -> torch.Tensor:
        if self._max_positions is None or self._max_positions >= self.num_positions:
            return torch.arange(self.num_positions)
        return torch.randperm(self.num_positions, generator=self._generator)[: self._max_positions]

    def _patches(self, seen: torch.Tensor) -> torch.Tensor:
        """`(batch, positions, C_in, *kernel)` to `(G, samples, width of a group)`."""
        patches = seen.reshape(seen.shape[0] * seen.shape[1], seen.shape[2], -1)
        return patches[:, self.blocks.columns].flatten(2).transpose(0, 1).float()

    def _outputs(self, wanted: torch.Tensor) -> torch.Tensor:
        """`(..., C_out)` to `(G, samples, C_out / G)`."""
        return wanted.reshape(-1, wanted.shape[-1])[:, self.blocks.rows].transpose(0, 1).float()

    @property
    def target_mean(self) -> torch.Tensor:
        """Mean of the wanted outputs, `(C_out,)`, in double precision."""
        return self._by_row(self._images.mean_target)

    def covariance(self) -> torch.Tensor:
        """Covariance of the patches as the network weighs it, `(G, width, width)`, in double precision."""
        return self._weighed(self._positions.covariance(), self._images.covariance())

    def cross_covariance(self) -> torch.Tensor:
        """The same of wanted outputs and patches, `(G, C_out / G, width)`."""
        return self._weighed(self._positions.cross_covariance(), self._images.cross_covariance())

    def _weighed(self, of_positions: torch.Tensor, of_images: torch.Tensor) -> torch.Tensor:
        if self._coherence == 0:
            return of_positions
        return (1 - self._coherence) * of_positions + self._coherence * self.num_positions * of_images

    def output_variance(self, weight: torch.Tensor) -> torch.Tensor:
        """Variance over images and positions of what a weight makes of the inputs, `(C_out,)`."""
        covariance = self._positions.covariance()
        blocks = self.blocks.of_weight(weight).to(covariance)
        return self._by_row(((blocks @ covariance) * blocks).sum(2))

    def _by_row(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(values.flatten()).index_copy_(0, self.blocks.rows.flatten(), values.flatten())

    def fitted(self, weight: torch.Tensor, *, ridge: float = RIDGE, has_bias: bool = True) -> torch.Tensor:
        """The weight that reproduces the wanted outputs best, near the given weight where the data are silent.

        With a bias, that is up to constants.
        """
        covariance, cross = self.covariance(), self.cross_covariance()
        if not has_bias:
            means = self._images.mean_input, self._images.mean_target
            share = 1 - self._coherence + self._coherence * self.num_positions
            covariance.baddbmm_(means[0][:, :, None], means[0][:, None], alpha=share)
            cross.baddbmm_(means[1][:, :, None], means[0][:, None], alpha=share)
        blocks = ridge_solution(covariance, cross, self.blocks.of_weight(weight).to(cross), ridge=ridge)
        return self.blocks.as_weight(blocks, weight.shape)

    def output_mean(self, weight: torch.Tensor) -> torch.Tensor:
        """Mean over images and positions of what a weight makes of the inputs, `(C_out,)`."""
        blocks = self.blocks.of_weight(weight).to(self._images.mean_input)
        return self._by_row((blocks @ self._images.mean_input[:, :, None])[:, :, 0])


class _Sums:
    """Sums of products over samples; centred when they are read."""

    count = 0

    def add(self, inputs: torch.Tensor, targets: torch.Tensor | None) -> None:
        """Add `(G, samples, width)` inputs and `(G, samples, rows)` targets."""
        if targets is None:
            targets = inputs[..., :0]
        if not self.count:
            groups, _, width = inputs.shape
            rows = targets.shape[2]
            self.first, self.first_target = inputs.mean(1, keepdim=True), targets.mean(1, keepdim=True)
            self.total, self.target_total = inputs.new_zeros(groups, width), inputs.new_zeros(groups, rows)
            self.second = inputs.new_zeros(groups, width, width)
            self.cross = inputs.new_zeros(groups, rows, width)
        # Relative to the first batch's mean: single precision loses a small variance beside a large mean.
        inputs, targets = inputs - self.first, targets - self.first_target
        self.count += inputs.shape[1]
        self.total += inputs.sum(1)
        self.target_total += targets.sum(1)
        self.second.baddbmm_(inputs.transpose(1, 2), inputs)
        self.cross.baddbmm_(targets.transpose(1, 2), inputs)

    @property
    def mean_input(self) -> torch.Tensor:
        """Mean input `(G, width)`."""
        return in_double(self.first[:, 0]) + in_double(self.total) / self.count

    @property
    def mean_target(self) -> torch.Tensor:
        """Mean target `(G, rows)`."""
        return in_double(self.first_target[:, 0]) + in_double(self.target_total) / self.count

    def covariance(self) -> torch.Tensor:
        """Covariance of the inputs."""
        mean = in_double(self.total) / self.count
        return (in_double(self.second) / self.count).baddbmm_(mean[:, :, None], mean[:, None], alpha=-1)

    def cross_covariance(self) -> torch.Tensor:
        """Covariance of targets and inputs."""
        mean, target_mean = in_double(self.total) / self.count, in_double(self.target_total) / self.count
        return (in_double(self.cross) / self.count).baddbmm_(target_mean[:, :, None], mean[:, None], alpha=-1)


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """In double precision, on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def ridge_solution(
    covariance: torch.Tensor, cross: torch.Tensor, weight: torch.Tensor, *, ridge: float = RIDGE
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
    strength = ridge * covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float32).tiny)
    strength = strength[..., None, None]
    pulled = covariance + strength * torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    factor = torch.linalg.cholesky(pulled)
    return torch.cholesky_solve((cross + strength * weight).mT, factor).mT
