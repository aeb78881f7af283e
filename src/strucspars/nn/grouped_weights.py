"""Dense weights to grouped ones and back (Sec. 3.2): tensors in, tensors out."""

import torch

from strucspars.core.hierarchy import connection_mask
from strucspars.core.permutation import inverse
from strucspars.core.plan import LayerPlan


def grouped_weight(weight: torch.Tensor, layer: LayerPlan) -> torch.Tensor:
    """The diagonal blocks of the permuted weight: `(C_out, C_in, *kernel)` to `(C_out, C_in / G, *kernel)`.

    Row `j` of the result is output channel `out_perm[j]`; its group's inputs are a run of `in_perm`.
    """
    groups = layer.num_groups
    out_perm, in_perm = _orders(layer, weight.device)
    rows = out_perm.view(groups, -1, 1)
    columns = in_perm.view(groups, 1, -1)
    blocks = weight[rows, columns]
    return blocks.reshape(weight.shape[0], weight.shape[1] // groups, *weight.shape[2:])


def dense_weight(grouped: torch.Tensor, layer: LayerPlan) -> torch.Tensor:
    """The dense weight of the same function, zero outside the groups, in the original channel order."""
    groups = layer.num_groups
    out_perm, in_perm = _orders(layer, grouped.device)
    weight = grouped.new_zeros(layer.weight_shape)
    blocks = grouped.reshape(groups, -1, *grouped.shape[1:])
    weight[out_perm.view(groups, -1, 1), in_perm.view(groups, 1, -1)] = blocks
    return weight


def kept_connections(layer: LayerPlan) -> torch.Tensor:
    """U_g in the original channel order: boolean `(C_out, C_in)`, on the CPU."""
    out_channels, in_channels = layer.weight_shape[:2]
    mask = connection_mask(out_channels, in_channels, layer.group_level)
    return torch.from_numpy(mask[inverse(layer.out_perm)][:, inverse(layer.in_perm)])


def _orders(layer: LayerPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(layer.out_perm, device=device), torch.tensor(layer.in_perm, device=device)
