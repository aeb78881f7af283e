"""Channels between the groups of adjacent layers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.report.confusion import (
    Confusion,
    confusion_figure,
    confusion_matrix,
    confusions_of,
)


def layer(outputs: int, inputs: int, level: int, *, kernel: int = 1, seed: int = 0) -> LayerPlan:
    random = np.random.default_rng(seed)
    return LayerPlan(
        group_level=level,
        out_perm=random.permutation(outputs),
        in_perm=random.permutation(inputs),
        weight_shape=(outputs, inputs, kernel, kernel),
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_every_group_sends_and_gets_as_many_channels_as_it_has(first: int, second: int, seed: int) -> None:
    one, other = layer(32, 16, first, seed=seed), layer(16, 32, second, seed=seed + 1)
    matrix = confusion_matrix(one, other)
    assert matrix.shape == (one.num_groups, other.num_groups)
    assert (matrix.sum(axis=1) == 32 // one.num_groups).all()
    assert (matrix.sum(axis=0) == 32 // other.num_groups).all()


def test_a_matrix_by_hand() -> None:
    first = LayerPlan(group_level=2, out_perm=np.array([3, 0, 1, 2]), in_perm=np.arange(4), weight_shape=(4, 4))
    second = LayerPlan(group_level=2, out_perm=np.arange(4), in_perm=np.array([0, 1, 2, 3]), weight_shape=(4, 4))
    # Groups of the first: {3, 0} and {1, 2}; of the second: {0, 1} and {2, 3}.
    assert confusion_matrix(first, second).tolist() == [[1, 1], [1, 1]]
    same = LayerPlan(group_level=2, out_perm=np.arange(4), in_perm=np.array([1, 2, 0, 3]), weight_shape=(4, 4))
    assert confusion_matrix(first, same).tolist() == [[0, 2], [2, 0]]


def test_shufflenets_shuffle_is_even_where_the_groups_divide_the_channels() -> None:
    plan = GroupingPlan({"b.conv1": layer(32, 32, 3), "b.conv2": layer(32, 32, 4, seed=1)})
    (confusion,) = confusions_of(plan)
    assert (confusion.first, confusion.second) == ("b.conv1", "b.conv2")
    np.testing.assert_array_equal(confusion.shufflenet, np.full((4, 8), 1))


def test_only_grouped_neighbours_inside_a_block_are_adjacent() -> None:
    plan = GroupingPlan(
        {
            "a.conv1": layer(16, 16, 2),
            "a.conv2": layer(16, 16, 2, kernel=3),  # follows conv1
            "a.conv3": layer(16, 16, 2),  # follows conv2
            "a.shortcut": layer(16, 16, 2),  # as wide as conv3's output, but fed by the block's input
            "b.conv1": layer(16, 16, 2),  # of another block
            "b.conv2": layer(16, 16, 1),  # has one group
            "b.conv3": layer(32, 16, 2),
            "b.conv4": layer(32, 64, 2),  # does not fit
        }
    )
    pairs = [(confusion.first, confusion.second) for confusion in confusions_of(plan)]
    assert pairs == [("a.conv1", "a.conv2"), ("a.conv2", "a.conv3")]


def test_basic_blocks_have_one_pair() -> None:
    plan = GroupingPlan({"a.conv1": layer(8, 8, 2, kernel=3), "a.conv2": layer(8, 8, 2, kernel=3)})
    assert len(confusions_of(plan)) == 1


def test_those_with_the_most_groups_are_chosen_in_network_order() -> None:
    levels = [2, 4, 3, 4, 2, 2]
    plan = GroupingPlan(
        {f"{block}.conv{number}": layer(32, 32, level) for block, level in enumerate(levels) for number in (1, 2)}
    )
    chosen = confusions_of(plan, 3)
    assert [confusion.first for confusion in chosen] == ["1.conv1", "2.conv1", "3.conv1"]


def test_the_alt_text_has_the_range_of_channels() -> None:
    plan = GroupingPlan({"b.conv1": layer(8, 8, 2), "b.conv2": layer(8, 8, 2, seed=4)})
    confusions = confusions_of(plan)
    learned = confusions[0].learned
    alt = confusion_figure(confusions).alt
    assert f"2 x 2 groups, {learned.min()} to {learned.max()} channels" in alt
    assert "ShuffleNet has 2 between all of them" in alt


def test_what_was_learned_is_drawn_above_shufflenets_with_the_number_in_every_cell() -> None:
    learned, even = np.array([[0, 1, 3, 4], [4, 3, 1, 0]]), np.full((2, 4), 2)
    confusion = Confusion(first="b.conv1", second="b.conv2", learned=learned, shufflenet=even)
    figure = confusion_figure([confusion])
    for axis, matrix in zip(figure.figure.axes, (learned, even), strict=True):
        np.testing.assert_array_equal(np.asarray(axis.images[0].get_array()), matrix)
        written = {text.get_position(): text.get_text() for text in axis.texts}
        assert written == {(column, row): str(count) for (row, column), count in np.ndenumerate(matrix)}
    assert "0 to 4 channels between two groups, 2 pairs without any" in figure.alt


def test_an_uneven_shuffle_of_shufflenet_is_told_as_a_range() -> None:
    uneven = Confusion(first="a", second="b", learned=np.eye(2, dtype=np.int64), shufflenet=np.array([[1, 2], [2, 1]]))
    assert uneven.shufflenet_words == "1 to 2 between them"


def test_of_equal_pairs_the_later_ones_are_chosen() -> None:
    plan = GroupingPlan({f"{block}.conv{number}": layer(32, 32, 2) for block in range(4) for number in (1, 2)})
    assert [each.first for each in confusions_of(plan, 2)] == ["2.conv1", "3.conv1"]


def test_a_pair_without_a_block_can_be_drawn() -> None:
    plan = GroupingPlan({"conv1": layer(8, 8, 2), "conv2": layer(8, 8, 2)})
    assert confusion_figure(confusions_of(plan)).svg()
