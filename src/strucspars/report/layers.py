"""The layers of a run as pictures need them: importance, groups, learned orders."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import max_group_level, num_groups
from strucspars.core.importance import kept_norm_by_level
from strucspars.cost.text_table import percent
from strucspars.report.drawing import drawable
from strucspars.report.reading import RunData, StoredMatrix

# The few largest entries of a layer would leave all others dark.
BRIGHT_QUANTILE = 0.995
# Lines closer than this would hide what they divide.
MOST_BOUNDARIES = 64
LARGEST_SIDE = 128


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerImportance:
    """One layer at compression; of a run in its first stage, as of its last checkpoint.

    Attributes:
        place: in network order, from 0.
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

    @property
    def alt(self) -> str:
        """What is to be seen of the layer, in words and numbers."""
        outputs, inputs = self.weight_shape[:2]
        groups = f"{self.num_groups} group{'s' if self.num_groups > 1 else ''} (group level {self.group_level})"
        words = f"{drawable(self.name, 80)}: {outputs} x {inputs} channels, {groups}."
        if not self.kept_norm:
            return words
        kept = ", ".join(f"level {level} {percent(share)}" for level, share in enumerate(self.kept_norm, start=1))
        return f"{words} Kept norm: {kept}."


def largest_level(run: RunData, weight_shape: tuple[int, ...]) -> int:
    """Largest group level that a layer of the run may reach."""
    return max_group_level(*weight_shape[:2], min_channels_per_group=run.recipe.sparsify.min_channels_per_group)


def layer_importances(run: RunData) -> Iterator[LayerImportance]:
    """Every layer that may be grouped, in network order; none before the end of the first epoch.

    One at a time: all matrices of a large network in double precision are gigabytes.
    """
    matrices = run.importance.get("end") or run.importance.get("now") or {}
    starts = run.importance.get("start") or {}
    for place, (name, (group_level, out_perm, in_perm)) in enumerate(_groupings(run).items()):
        shape = run.weight_shapes[name]
        before = _doubled(matrices.get(name))
        permuted = None if before is None else before[out_perm][:, in_perm]
        yield LayerImportance(
            place=place,
            name=name,
            weight_shape=shape,
            group_level=group_level,
            largest_level=largest_level(run, shape),
            kept_norm=_kept_norm(run, place, permuted),
            out_perm=out_perm,
            in_perm=in_perm,
            start=_doubled(starts.get(name)),
            before=before,
            permuted=permuted,
        )


def _groupings(run: RunData) -> dict[str, tuple[int, IntArray, IntArray]]:
    """Level and orders of every layer, of the plan or of the last stored epoch."""
    if run.plan is not None:
        return {name: (layer.group_level, layer.out_perm, layer.in_perm) for name, layer in run.plan.layers.items()}
    if not run.dynamics:
        return {}
    last = run.dynamics[-1]
    levels = last.group_level.tolist()
    return dict(zip(run.weight_shapes, zip(levels, last.out_perm, last.in_perm, strict=True), strict=True))


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


def brightest(matrix: FloatArray) -> float:
    """The importance that is drawn in the lightest colour."""
    means = block_means(matrix)
    return float(np.quantile(means, BRIGHT_QUANTILE)) or float(means.max())


def boundaries(groups: int) -> tuple[float, ...]:
    """Where one of equal groups ends and the next begins, as fractions of the side; none where they are too many.

    >>> boundaries(4)
    (0.25, 0.5, 0.75)
    """
    return tuple(place / groups for place in range(1, groups)) if groups <= MOST_BOUNDARIES else ()


def block_means(matrix: FloatArray, *, largest_side: int = LARGEST_SIDE) -> FloatArray:
    """Means over blocks of nearly equal size, so many that no side is longer than `largest_side`.

    >>> block_means(np.array([[1.0, 3.0], [5.0, 7.0]]), largest_side=1)
    array([[4.]])
    """
    row_starts, column_starts = (_block_starts(length, largest_side) for length in matrix.shape)
    sums = np.add.reduceat(np.add.reduceat(matrix, row_starts, axis=0), column_starts, axis=1)
    heights, widths = (
        np.diff(starts, append=length) for starts, length in zip((row_starts, column_starts), matrix.shape, strict=True)
    )
    means: FloatArray = sums / np.outer(heights, widths)
    return means


def _block_starts(length: int, largest_side: int) -> IntArray:
    """Where the blocks begin. Equal ones, if there are enough: then block and group boundaries mostly meet."""
    equal = max(blocks for blocks in range(1, min(length, largest_side) + 1) if length % blocks == 0)
    blocks = equal if 2 * equal >= min(length, largest_side) else largest_side
    return np.arange(blocks, dtype=np.int64) * length // blocks
