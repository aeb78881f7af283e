"""Which groups feed which: confusion matrices of adjacent group convolutions against ShuffleNet's (Table 6, Fig. 7)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from strucspars.convert.ablation import reordered_plan
from strucspars.core.checks import IntArray
from strucspars.core.permutation import inverse
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.report.drawing import SEQUENTIAL, NamedFigure, drawable, house_style
from strucspars.report.named_table import NamedTable

# Wider tables are hard to read; the figure shows them.
MOST_TABLE_GROUPS = 16
# Numbers in smaller cells would not be readable.
MOST_WRITTEN_GROUPS = 8
MOST_PAIRS = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class Confusion:
    """Two adjacent group convolutions, and how many channels go from each group to each, `(G_1, G_2)`."""

    first: str
    second: str
    learned: IntArray
    shufflenet: IntArray

    @property
    def shufflenet_words(self) -> str:
        """Channels between two groups after ShuffleNet's shuffle, for a sentence."""
        fewest, most = int(self.shufflenet.min()), int(self.shufflenet.max())
        return f"{fewest} between all of them" if fewest == most else f"{fewest} to {most} between them"


def confusions_of(plan: GroupingPlan, most: int = MOST_PAIRS) -> tuple[Confusion, ...]:
    """Confusion matrices of the adjacent pairs of layers with the most groups, in network order; of equals, the later.

    A plan has no graph: two layers count as adjacent if they follow each other in one block (a module) of the network
    and the first has as many outputs as the second has inputs.
    """
    layers, uniform = plan.layers, reordered_plan(plan, "shufflenet").layers
    pairs = list(_adjacent(plan))
    ranked = sorted(pairs, key=lambda pair: layers[pair[0]].num_groups * layers[pair[1]].num_groups)
    chosen = ranked[-most:]
    return tuple(
        Confusion(
            first=first,
            second=second,
            learned=confusion_matrix(layers[first], layers[second]),
            shufflenet=confusion_matrix(uniform[first], uniform[second]),
        )
        for first, second in pairs
        if (first, second) in chosen
    )


def confusion_matrix(first: LayerPlan, second: LayerPlan) -> IntArray:
    """`D[i, j]`: channels from group i of the first layer to group j of the second, `(G_1, G_2)` (Appendix C)."""
    source = inverse(first.out_perm) * first.num_groups // len(first.out_perm)
    target = inverse(second.in_perm) * second.num_groups // len(second.in_perm)
    counts = np.zeros((first.num_groups, second.num_groups), dtype=np.int64)
    np.add.at(counts, (source, target), 1)
    return counts


def _adjacent(plan: GroupingPlan) -> Iterator[tuple[str, str]]:
    for (first, one), (second, other) in pairwise(plan.layers.items()):
        block = [name for name in plan.layers if name.rpartition(".")[0] == second.rpartition(".")[0]]
        shapes, place = [plan.layers[name].weight_shape for name in block], block.index(second)
        # A shortcut is 1 x 1, from the inputs of a block to the outputs of the layer before it, after three or more.
        is_shortcut = place >= 3 and shapes[place] == (shapes[place - 1][0], shapes[0][1], 1, 1)
        fits = one.weight_shape[0] == other.weight_shape[1] and one.num_groups > 1 and other.num_groups > 1
        if first in block and fits and not is_shortcut:
            yield first, second


def confusion_table(confusion: Confusion, number: int) -> NamedTable:
    """A learned matrix as in the paper's Table 6; `number`, from 1, tells the tables of a run apart."""
    rows, columns = confusion.learned.shape
    return NamedTable(
        name=f"confusion-{number}",
        title=f"Channels between the groups of {confusion.first} and {confusion.second}",
        columns={"from \\ to": "text", **{f"G{group + 1}": "count" for group in range(columns)}},
        rows=tuple((f"G{group + 1}", *confusion.learned[group].tolist()) for group in range(rows)),
        notes=(f"ShuffleNet's fixed shuffle has {confusion.shufflenet_words}.",),
    )


def confusion_figure(confusions: Sequence[Confusion]) -> NamedFigure:
    """Draw some pairs: what was learned above, ShuffleNet's below."""
    count = len(confusions)
    with house_style():
        figure = Figure(figsize=(1.6 + 1.75 * max(count, 2), 4.4), layout="constrained")
        axes = figure.subplots(2, count, squeeze=False)
        for column, confusion in enumerate(confusions):
            # Twice the even share, so that this has the middle colour; more where it is a channel or two.
            even = float(confusion.learned.mean())
            lightest = max(2 * even, min(float(confusion.learned.max()), 4 * even), 1.0)
            for row, matrix in enumerate((confusion.learned, confusion.shufflenet)):
                _draw(axes[row, column], matrix, lightest=lightest)
            axes[0, column].set_title(_title(confusion), fontsize="small")
            axes[1, column].set_xlabel("group of the second", fontsize="small")
        for row, words in enumerate(("learned", "ShuffleNet")):
            axes[row, 0].set_ylabel(f"{words}\ngroup of the first", fontsize="small")
    return NamedFigure(
        name="confusion",
        title="Which groups feed which",
        caption=(
            "Channels between the groups of two group convolutions that follow each other in a block: what was learned "
            "(above), and the even spread of ShuffleNet's fixed shuffle (below). Lighter is more."
        ),
        alt=" ".join(_alt(confusion) for confusion in confusions),
        figure=figure,
        tables=tuple(
            confusion_table(confusion, number)
            for number, confusion in enumerate(confusions, start=1)
            if max(confusion.learned.shape) <= MOST_TABLE_GROUPS
        ),
    )


def _draw(axis: Axes, matrix: IntArray, *, lightest: float) -> None:
    axis.imshow(matrix, cmap=SEQUENTIAL, vmin=0, vmax=lightest, aspect="equal")
    axis.grid(visible=False)
    axis.set_xticks([])
    axis.set_yticks([])
    if max(matrix.shape) > MOST_WRITTEN_GROUPS:
        return
    for (row, column), channels in np.ndenumerate(matrix):
        colour = "#ffffff" if channels < lightest / 2 else "#000000"
        axis.text(column, row, str(channels), ha="center", va="center", color=colour, fontsize=8)


def _title(confusion: Confusion) -> str:
    """The name of the block, then those of its two layers."""
    block, _, first = confusion.first.rpartition(".")
    pair = f"{drawable(first, 11)} to {drawable(confusion.second.rpartition('.')[2], 11)}"
    # Blocks differ at the end of their names.
    return f"{drawable(block if len(block) <= 22 else f'...{block[-19:]}', 22)}\n{pair}" if block else pair


def _alt(confusion: Confusion) -> str:
    learned, pair = confusion.learned, f"{confusion.first} to {confusion.second}"
    counts = f"{learned.min()} to {learned.max()} channels between two groups, {(learned == 0).sum()} pairs without any"
    groups = " x ".join(map(str, learned.shape))
    return f"{pair}: {groups} groups, {counts}; ShuffleNet has {confusion.shufflenet_words}."
