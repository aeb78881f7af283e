"""The importance matrix of every layer, in the network's channel order and in the learned one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import max_group_level, num_groups
from strucspars.core.importance import kept_norm_by_level
from strucspars.report.reading import RunData
from strucspars.report.run_parts import StoredMatrix


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerImportance:
    """One layer at compression; of a run in its first stage, as of its last checkpoint.

    Attributes:
        place: in network order, from 0.
        name: the layer's name.
        weight_shape: of the dense weight, `(C_out, C_in, *kernel)`.
        group_level: of the plan, or of the last epoch.
        largest_level: that the layer may reach.
        kept_norm: share of the norm that the levels 1, 2, ... keep; empty where not known.
        out_perm, in_perm: the learned orders, `perm[new] = old`.
        start: S before training; None if it was not stored.
        before: S in the network's channel order; None likewise.
        permuted: S' = `S[out_perm][:, in_perm]`; None likewise.
    """

    place: int
    name: str
    weight_shape: tuple[int, ...]
    group_level: int
    largest_level: int
    kept_norm: tuple[float, ...]
    out_perm: IntArray
    in_perm: IntArray
    start: FloatArray | None
    before: FloatArray | None
    permuted: FloatArray | None

    @property
    def num_groups(self) -> int:
        """Number of groups of the level."""
        return num_groups(self.group_level)

    @property
    def halvings(self) -> int:
        """How many halvings R_g penalises: those of the level, and one more while there is one (Sec. 3.3)."""
        return min(self.group_level, self.largest_level - 1)

    @property
    def kept_at_level(self) -> float | None:
        """Share of the norm that the layer's own groups keep; None where not known."""
        return self.kept_norm[self.group_level - 1] if self.group_level <= len(self.kept_norm) else None


def largest_level(run: RunData, weight_shape: tuple[int, ...]) -> int:
    """Largest group level that a layer of the run may reach."""
    width = 1 if run.recipe is None else run.recipe.sparsify.min_channels_per_group
    return max_group_level(*weight_shape[:2], min_channels_per_group=width)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Grouping:
    group_level: int
    out_perm: IntArray
    in_perm: IntArray


def layer_importances(run: RunData) -> Iterator[LayerImportance]:
    """Every layer that may be grouped, in network order; none before the first epoch's end.

    One at a time: all matrices of a large network in double precision are gigabytes.
    """
    matrices: Mapping[str, StoredMatrix] = run.importance.get("end") or run.importance.get("now") or {}
    starts = run.importance.get("start") or {}
    for place, (name, grouping) in enumerate(_groupings(run).items()):
        shape = run.weight_shapes[name]
        before = _doubled(matrices.get(name))
        permuted = None if before is None else before[grouping.out_perm][:, grouping.in_perm]
        yield LayerImportance(
            place=place,
            name=name,
            weight_shape=shape,
            group_level=grouping.group_level,
            largest_level=largest_level(run, shape),
            kept_norm=_kept_norm(run, place, permuted),
            out_perm=grouping.out_perm,
            in_perm=grouping.in_perm,
            start=_doubled(starts.get(name)),
            before=before,
            permuted=permuted,
        )


def _groupings(run: RunData) -> dict[str, _Grouping]:
    """Levels and orders of the plan, or of the last stored epoch."""
    if run.plan is not None:
        return {
            name: _Grouping(group_level=layer.group_level, out_perm=layer.out_perm, in_perm=layer.in_perm)
            for name, layer in run.plan.layers.items()
        }
    if not run.dynamics:
        return {}
    last = run.dynamics[-1]
    return {
        name: _Grouping(
            group_level=int(last.group_level[place]), out_perm=last.out_perm[place], in_perm=last.in_perm[place]
        )
        for place, name in enumerate(run.weight_shapes)
    }


def _doubled(matrix: StoredMatrix | None) -> FloatArray | None:
    return None if matrix is None else matrix.astype(np.float64)


def _kept_norm(run: RunData, place: int, permuted: FloatArray | None) -> tuple[float, ...]:
    """From the matrix itself; where that was not stored, from the last epoch."""
    if permuted is not None:
        return tuple(kept_norm_by_level(permuted).tolist())
    if not run.dynamics:
        return ()
    kept = run.dynamics[-1].kept_norm[place]
    return tuple(kept[np.isfinite(kept)].tolist())
