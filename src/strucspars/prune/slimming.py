"""Network Slimming (Liu et al., ICCV 2017), the baseline of Table 1.

Training adds an L1 penalty on the scales of all batch norms; one threshold over all scales then selects the channels,
and the narrowed network is finetuned.

Differs from Liu et al.: they fix the fraction of channels to remove; here the threshold is searched for a fraction of
all parameters, so that methods are compared at the same size.
"""

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from strucspars.core.checks import FloatArray, IntArray, checked_target, is_number
from strucspars.cost.counting import ExampleInputs, count_macs
from strucspars.prune.narrowing import ChannelSelection, NormSite, dense_sites, weights_before_after


class SlimmingPenalty:
    """The penalty `strength * sum(|scale|)` over every `BatchNorm2d` of a model, as a gradient.

    Call `add_gradient_` between `backward` and the optimizer's step; with a GradScaler, after `unscale_`.

    Args:
        model: any network with batch norms, wrapped or not.
        strength: weight of the penalty. Liu et al. choose among 1e-3, 1e-4 and 1e-5; a good one leaves as many scales
            at zero as channels are to go.

    >>> norm = nn.BatchNorm2d(2)
    >>> SlimmingPenalty(norm, strength=0.5).add_gradient_()
    >>> norm.weight.grad
    tensor([0.5000, 0.5000])
    """

    def __init__(self, model: nn.Module, strength: float) -> None:
        if not is_number(strength) or not 0 <= strength < math.inf:
            raise ValueError(f"slimming strength must be a number from 0 on, such as 5e-4, got {strength!r}")
        self._strength = float(strength)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        self._norms = [norm for norm in norms if norm.affine]
        if not self._norms:
            raise ValueError(f"{type(model).__name__} has no BatchNorm2d with a scale, so there is nothing to slim")

    @torch.no_grad()
    def add_gradient_(self) -> None:
        """Add the penalty's gradient to that of the scales, zero where a scale is zero. Frozen scales are left alone.

        A few fused kernels, and no waiting for the device: it can be part of a captured graph.
        """
        scales: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        # Looked up at every step, because parameters may be replaced. Shared scales are penalised once.
        for scale in dict.fromkeys(norm.weight for norm in self._norms):
            if scale.requires_grad:
                if scale.grad is None:
                    scale.grad = torch.zeros_like(scale)
                scales.append(scale)
                gradients.append(scale.grad)
        if scales:
            torch._foreach_add_(gradients, torch._foreach_sign(scales), alpha=self._strength)


def select_channels(
    model: nn.Module, *, target: float, example_inputs: ExampleInputs | None = None
) -> ChannelSelection:
    """Remove the channels of least absolute scale, as few as make the network smaller by `target`.

    One order over the batch norms that can narrow (`narrowing.py` says which), with at least one channel left in each.
    Channels of equal scale go from all norms alike. Nothing is built: the parameters are counted from the widths.

    Args:
        model: a dense `PreactivationResNet` or `CifarResNet`.
        target: fraction of all the network's parameters to remove, in [0, 1).
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`, to also note the fraction of
            multiply-accumulates that goes.

    Raises:
        ValueError: the target cannot be reached (the message names the largest that can), a scale is not finite, or
            the network is none that can be slimmed.

    >>> from strucspars.models.cifar import CifarResNet
    >>> selection = select_channels(CifarResNet(20), target=0.5)
    >>> 0.5 <= selection.removed_param_fraction < 0.51
    True
    """
    target = checked_target(target)
    sites = dense_sites(model)
    scales = [_finite_scales(model, site) for site in sites]
    norm_of, channel_of = _removal_order(scales)
    whole = sum(parameter.numel() for parameter in model.parameters())

    def weights_at(removed: int) -> dict[str, tuple[int, int]]:
        gone = np.bincount(norm_of[:removed], minlength=len(sites))
        kept_widths = {site.norm: site.width - int(count) for site, count in zip(sites, gone, strict=True)}
        return weights_before_after(model, sites, kept_widths)

    def removed_fraction(removed: int) -> float:
        return sum(before - after for before, after in weights_at(removed).values()) / whole

    count = _fewest_removals(removed_fraction, len(norm_of), target)
    gone = [channel_of[:count][norm_of[:count] == index] for index in range(len(sites))]
    return ChannelSelection(
        {site.norm: np.setdiff1d(np.arange(site.width), gone[index]) for index, site in enumerate(sites)},
        {site.norm: site.width for site in sites},
        threshold=float(scales[norm_of[count - 1]][channel_of[count - 1]]) if count else 0.0,
        removed_param_fraction=removed_fraction(count),
        removed_mac_fraction=_removed_mac_fraction(model, weights_at(count), example_inputs),
    )


def _fewest_removals(removed_fraction: Callable[[int], float], removable: int, target: float) -> int:
    """How many channels to remove, in order, to meet the target; the fraction grows with every channel."""
    most = removed_fraction(removable)
    if most < target:
        # Rounded down, so that the number in the message can itself be reached.
        raise ValueError(
            f"target {target:g} cannot be reached: with one channel left in every batch norm that can narrow, "
            f"{math.floor(most * 1e4) / 1e4:.4f} of all params would be removed; lower the target"
        )
    return bisect_left(range(removable + 1), True, key=lambda removed: removed_fraction(removed) >= target)


def _finite_scales(model: nn.Module, site: NormSite) -> FloatArray:
    weight = model.get_parameter(f"{site.norm}.weight").detach()
    scales = weight.abs().to("cpu", torch.float64).numpy()
    if not np.isfinite(scales).all():
        raise ValueError(f"batch norm {site.norm!r} has scales that are not finite; the training has diverged")
    return scales


def _removal_order(scales: list[FloatArray]) -> tuple[IntArray, IntArray]:
    """(norm, channel) of every removable channel in order of removal; the last one of each norm stays."""
    norms = np.repeat(np.arange(len(scales)), [len(values) for values in scales])
    channels = np.concatenate([np.arange(len(values)) for values in scales])
    positions = np.concatenate([np.arange(len(values)) / len(values) for values in scales])
    # By scale; equal scales, such as zeros, by their position in the norm, or the first norms would be emptied.
    order = np.lexsort((positions, np.concatenate(scales)))
    _, last_from_end = np.unique(norms[order][::-1], return_index=True)
    order = np.delete(order, len(order) - 1 - last_from_end)
    return norms[order], channels[order]


def _removed_mac_fraction(
    model: nn.Module, weights: dict[str, tuple[int, int]], example_inputs: ExampleInputs | None
) -> float | None:
    """MACs go with the weights that cause them."""
    if example_inputs is None:
        return None
    counted = count_macs(model, example_inputs)
    removed = 0.0
    for name, layer in counted.layers.items():
        before, after = weights.get(name, (1, 1))
        removed += layer.macs * (before - after) / before
    return removed / counted.macs
