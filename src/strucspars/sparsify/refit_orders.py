"""Channel orders for groups whose weights are refitted: which connections to keep so that a refit leaves least error.

With inputs of covariance A, a group with the input channels S explains `c_S A_SS^-1 c_S'` of the variance of an output,
where c is the output's covariance with the inputs; inputs that are correlated stand in for each other. No sum over
single connections can tell this. The steps alternate as those of Sec. 3.2 do. Given the inputs of the groups, outputs
go to the groups that explain most of them: one exact transport problem. Given the outputs, so do the inputs, each by
what it alone would add to a group or take from it; several that move at once may hinder each other, so such a step is
taken only if it explains more.
"""

from dataclasses import dataclass

import torch

from strucspars.core.transport import assign_by_group_cycles
from strucspars.sparsify.extensions import Orders

# Of the inputs' mean square: what is determined less follows noise.
RIDGE = 1e-2
MAX_STEPS = 20
# Of the error that is left: smaller gains are not worth another step.
SMALLEST_GAIN = 3e-3
# Of the inputs, how many may move in a step, chosen at random; the next share once a step explains no more.
MOVING = (1.0, 0.5, 0.5, 0.2, 0.2, 0.1, 0.1)


@dataclass(frozen=True, eq=False)
class Regression:
    """A layer as the regression of its outputs on its inputs.

    Attributes:
        covariance: of the input patches, `(C_in * kernel, C_in * kernel)`.
        cross: of outputs and input patches, `(C_out, C_in * kernel)`.
        sensitivity: how much the error of each output counts, `(C_out,)`.
        variance: of all outputs together, so weighed.
        area: of the kernel.
    """

    covariance: torch.Tensor
    cross: torch.Tensor
    sensitivity: torch.Tensor
    variance: float
    area: int

    @staticmethod
    def of(weight: torch.Tensor, covariance: torch.Tensor, sensitivity: torch.Tensor) -> "Regression":
        """The layer of a weight `(C_out, C_in, *kernel)`."""
        flat = weight.flatten(1)
        cross = flat @ covariance
        ridge = (RIDGE * covariance.diagonal().mean()).clamp_min(torch.finfo(torch.float32).tiny)
        pulled = covariance + ridge * torch.eye(len(covariance), device=covariance.device)
        variance = float(((cross * flat).sum(1) * sensitivity).sum())
        return Regression(pulled, cross, sensitivity, variance, flat.shape[1] // weight.shape[1])


def refit_orders(layer: Regression, orders: Orders, groups: int) -> Orders:
    """Orders whose groups, refitted, leave no more error than those of the given ones, and often 5 to 20 % less."""
    rows, columns = (torch.tensor(order, device=layer.covariance.device).view(groups, -1) for order in orders)
    inside = _Inside.of(layer, columns)
    rows, explained = _outputs_assigned(inside.explained, rows)
    generator = torch.Generator().manual_seed(0)
    shares, worth = iter(MOVING), inside.worth_of_inputs(rows)
    share = next(shares)
    for _ in range(MAX_STEPS):
        # Staying is worth more than anything else to inputs that may not move.
        stays = torch.rand(len(worth), 1, generator=generator).to(worth.device) >= share
        tried = _Inside.of(layer, _assigned(worth + stays * _one_hot(inside.columns) * worth.sum(), inside.columns))
        tried_rows, then = _outputs_assigned(tried.explained, rows)
        if then > explained + SMALLEST_GAIN * max(layer.variance - explained, 0.0):
            rows, inside, explained = tried_rows, tried, then
            worth = inside.worth_of_inputs(rows)
        elif (share := next(shares, 0.0)) == 0:
            break
    return rows.flatten().cpu().numpy(), inside.columns.flatten().cpu().numpy()


@dataclass(frozen=True, eq=False)
class _Inside:
    """The regressions inside the groups: `columns (G, C_in / G)`, patches `(G, width)`, Cholesky factors of A_SS."""

    layer: Regression
    columns: torch.Tensor
    patches: torch.Tensor
    factors: torch.Tensor

    @staticmethod
    def of(layer: Regression, columns: torch.Tensor) -> "_Inside":
        kernel = torch.arange(layer.area, device=columns.device)
        patches = (columns[..., None] * layer.area + kernel).flatten(1)
        factors = torch.linalg.cholesky(layer.covariance[patches[:, :, None], patches[:, None, :]])
        return _Inside(layer, columns, patches, factors)

    @property
    def explained(self) -> torch.Tensor:
        """What each group would explain of each output, `(C_out, G)`."""
        cross = self.layer.cross[:, self.patches].permute(1, 2, 0)
        solved: torch.Tensor = torch.linalg.solve_triangular(self.factors, cross, upper=False)
        return solved.square().sum(1).T * self.layer.sensitivity[:, None]

    def worth_of_inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """What each input channel explains in its group, or would explain in another one, `(C_in, G)`."""
        layer, (groups, width) = self.layer, self.columns.shape
        sensitivity, area = layer.sensitivity[rows], layer.area
        cross = layer.cross[rows]
        inside = cross.gather(2, self.patches[:, None].expand(-1, cross.shape[1], -1))
        weights = torch.cholesky_solve(inside.mT, self.factors)
        # An input that leaves: its weights w cost w' B^-1 w, with B its block of the inverse.
        inverse = _kernel_blocks(torch.cholesky_inverse(self.factors), width, area)
        leaving = _quadratic(inverse, weights.view(groups, width, area, -1), sensitivity)
        # One that joins: what those inside leave of it, and of the outputs' covariance with it.
        reached = layer.covariance[self.patches]
        left = (cross - weights.mT @ reached).view(groups, -1, cross.shape[2] // area, area).permute(0, 2, 3, 1)
        solved = torch.linalg.solve_triangular(self.factors, reached, upper=False)
        solved = solved.view(groups, -1, left.shape[1], area).permute(0, 2, 1, 3)
        own = _kernel_blocks(layer.covariance[None], left.shape[1], area)
        floor = RIDGE * layer.covariance.diagonal().mean() * torch.eye(area, device=own.device)
        joining = _quadratic(own - solved.mT @ solved + floor, left, sensitivity)
        return joining.scatter(1, self.columns, leaving).T


def _kernel_blocks(matrices: torch.Tensor, channels: int, area: int) -> torch.Tensor:
    """The blocks of single channels, `(G, C, area, area)`, of matrices `(G, C * area, C * area)`."""
    blocks = matrices.view(len(matrices), channels, area, channels, area)
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _quadratic(blocks: torch.Tensor, vectors: torch.Tensor, sensitivity: torch.Tensor) -> torch.Tensor:
    """`sum_j F_j v_j' B^-1 v_j` of every channel, `(G, C)`.

    From B `(G, C, area, area)`, v `(G, C, area, rows)` and F `(G, rows)`.
    """
    solved = vectors / blocks if blocks.shape[-1] == 1 else torch.linalg.solve(blocks, vectors)
    return torch.einsum("gcr,gr->gc", (vectors * solved).sum(2), sensitivity)


def _one_hot(members: torch.Tensor) -> torch.Tensor:
    """Which group each channel is in, `(C, G)`."""
    groups = torch.empty(members.numel(), dtype=torch.long, device=members.device)
    groups[members.flatten()] = torch.arange(len(members), device=members.device).repeat_interleave(members.shape[1])
    return torch.nn.functional.one_hot(groups, len(members))


def _assigned(worth: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """The groups `(G, C / G)` whose channels are worth most in them; `worth` is `(C, G)`."""
    present = members.flatten()
    order = assign_by_group_cycles(-worth[present].double().cpu().numpy())
    return present[torch.tensor(order, device=present.device)].view(members.shape)


def _outputs_assigned(explained: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The outputs of each group, and how much of all outputs is then explained."""
    best = _assigned(explained, rows)
    return best, float((explained * _one_hot(best)).sum())
