import copy
import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.core.hierarchy import max_group_level
from strucspars.core.plan import FORMAT_VERSION, GroupingPlan, LayerPlan


def random_layer(seed: int, shape: tuple[int, ...] = (8, 4, 3, 3)) -> LayerPlan:
    generator = np.random.default_rng(seed)
    level = int(generator.integers(1, max_group_level(*shape[:2]) + 1))
    return LayerPlan(
        group_level=level,
        out_perm=generator.permutation(shape[0]),
        in_perm=generator.permutation(shape[1]),
        weight_shape=shape,
    )


def random_plan(seed: int = 0) -> GroupingPlan:
    layers = {"layer1.0.conv1": random_layer(seed), "layer1.0.conv2": random_layer(seed + 1, (24, 16))}
    return GroupingPlan(
        layers,
        budget="macs",
        target=0.25,
        min_kept_norm=0.91,
        removed_param_fraction=0.36,
        removed_mac_fraction=0.3,
    )


def tampered(**changes: object) -> str:
    """A good plan's JSON with some top-level entries replaced; `...` removes the entry."""
    document = json.loads(random_plan().to_json()) | changes
    return json.dumps({key: value for key, value in document.items() if value is not ...})


def tampered_layer(**changes: object) -> str:
    document = json.loads(random_plan().to_json())
    layer = document["layers"]["layer1.0.conv1"] | changes
    document["layers"]["layer1.0.conv1"] = {key: value for key, value in layer.items() if value is not ...}
    return json.dumps(document)


@given(st.integers(0, 2**32 - 2), st.text(max_size=20), st.none() | st.floats(0, 1))
def test_a_plan_survives_json(seed: int, name: str, target: float | None) -> None:
    plan = GroupingPlan({name: random_layer(seed)}, min_kept_norm=target, removed_param_fraction=0.5)
    restored = GroupingPlan.from_json(plan.to_json())
    assert restored == plan
    assert restored.to_json() == plan.to_json()


def shared_plan() -> GroupingPlan:
    """A layer that writes two parts, and one that reads them concatenated."""
    orders = {"a": (1, 0), "b": (2, 0, 1, 3), "c": (1, 0)}
    writer = LayerPlan(
        group_level=2, out_perm=np.array([1, 0]), in_perm=np.array([0, 1]), weight_shape=(2, 2), out_orders=("a",)
    )
    reader = LayerPlan(
        group_level=2,
        out_perm=np.array([1, 0]),
        in_perm=np.array([1, 0, 4, 2, 3, 5]),
        weight_shape=(2, 6),
        out_orders=("c",),
        in_orders=("a", "b"),
        pieces=2,
    )
    return GroupingPlan({"writer": writer, "reader": reader}, shared_orders=orders)


def test_shared_orders_are_stored_once_and_by_name() -> None:
    plan = shared_plan()
    document = json.loads(plan.to_json())
    assert document["shared_orders"] == {"a": [1, 0], "b": [2, 0, 1, 3], "c": [1, 0]}
    reader = document["layers"]["reader"]
    assert reader == {
        "group_level": 2,
        "weight_shape": [2, 6],
        "out_orders": ["c"],
        "in_orders": ["a", "b"],
        "pieces": 2,
    }
    assert GroupingPlan.from_json(plan.to_json()) == plan
    assert "3 orders of channels shared between layers" in repr(plan)


def test_plans_of_the_older_format_read_as_free_orders() -> None:
    document = json.loads(random_plan().to_json())
    older = {name: value for name, value in document.items() if name != "shared_orders"} | {"format_version": 1}
    plan = GroupingPlan.from_json(json.dumps(older))
    assert plan == random_plan()
    assert not plan.shared_orders


def test_a_layer_takes_other_orders_for_its_own() -> None:
    reader = shared_plan().layers["reader"].with_orders(np.arange(2), np.arange(6))
    assert (reader.out_orders, reader.in_orders, reader.pieces) == ((), (), 1)
    assert reader.in_perm.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_layer_must_have_the_orders_that_it_shares() -> None:
    plan = shared_plan()
    with pytest.raises(ValueError, match="layer 'writer': its order is not the shared one of a"):
        replace(plan, shared_orders={**plan.shared_orders, "a": (0, 1)})
    with pytest.raises(ValueError, match="layer 'writer': the plan has no shared order 'a'"):
        replace(plan, shared_orders={})


def test_shared_orders_of_any_sequence_become_plain_and_are_the_plans_own() -> None:
    plan = shared_plan()
    orders: dict[str, Any] = {name: np.array(order) for name, order in plan.shared_orders.items()}
    of_arrays = replace(plan, shared_orders=orders)
    orders.clear()
    assert GroupingPlan.from_json(of_arrays.to_json()) == of_arrays == plan


def test_every_shared_order_must_be_a_permutation() -> None:
    # Together they would be one.
    with pytest.raises(ValueError, match="shared order 'a' is not a permutation"):
        replace(shared_plan(), shared_orders={**shared_plan().shared_orders, "a": (0, 2), "b": (1, 0, 3, 2)})


def test_layers_keep_the_networks_order() -> None:
    plan = GroupingPlan({name: random_layer(0) for name in ("z", "a", "m")})
    assert list(GroupingPlan.from_json(plan.to_json()).layers) == ["z", "a", "m"]


def test_plans_that_differ_are_not_equal() -> None:
    assert random_plan(0) == random_plan(0)
    assert random_plan(0) != replace(random_plan(0), min_kept_norm=0.92)
    assert random_layer(0) != "layer"


@pytest.mark.parametrize(
    "change",
    [
        {"group_level": 1},
        {"out_perm": np.arange(8)},
        {"in_perm": np.arange(4)},
        {"weight_shape": (8, 4, 1, 1)},
    ],
)
def test_layers_that_differ_in_one_field_are_not_equal(change: dict[str, Any]) -> None:
    reversed_orders: dict[str, Any] = {"out_perm": np.arange(8)[::-1], "in_perm": np.arange(4)[::-1]}
    layer = LayerPlan(group_level=2, weight_shape=(8, 4, 3, 3), **reversed_orders)
    assert layer == LayerPlan(group_level=2, weight_shape=(8, 4, 3, 3), **reversed_orders)
    assert layer != replace(layer, **change)


def test_a_plan_can_be_copied_and_sent_to_other_processes() -> None:
    plan = random_plan()
    assert copy.deepcopy(plan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_callers_arrays_and_mapping_are_copied() -> None:
    out_perm = np.array([1, 0])
    layers = {"conv": LayerPlan(group_level=2, out_perm=out_perm, in_perm=np.array([0, 1]), weight_shape=(2, 2))}
    plan = GroupingPlan(layers)
    out_perm[:] = 0
    layers.clear()
    assert plan.layers["conv"].out_perm.tolist() == [1, 0]
    assert plan.layers["conv"].num_groups == 2
    with pytest.raises(TypeError, match="does not support item assignment"):
        plan.layers["other"] = plan.layers["conv"]  # type: ignore[index]  # the attempt is the point


def test_numpy_numbers_become_plain_ones() -> None:
    numbers: dict[str, Any] = {"group_level": np.int64(2), "weight_shape": tuple(np.array([2, 2]))}
    layer = LayerPlan(out_perm=np.array([1, 0]), in_perm=np.array([0, 1]), **numbers)
    fractions: dict[str, Any] = {"target": np.float32(0.25), "removed_param_fraction": np.float64(0.5)}
    plan = GroupingPlan({"conv": layer}, **fractions)
    assert GroupingPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", r"^grouping plan: must be an object, got \[\]"),
        ('{"format": "other"}', "^grouping plan: format: must be 'strucspars-plan', got 'other'"),
        ("{}", "format: must be 'strucspars-plan', got None"),
        (tampered(format_version=...), "format_version: must be 2, got None"),
        (tampered(format_version="1"), "format_version: must be 2, got '1'"),
        (tampered(format_version=0), "format_version: must be 2, got 0"),
        (
            tampered(format_version=FORMAT_VERSION + 1, strucspars_version="9.9"),
            "format_version: must be 2, got 3; upgrade strucspars",
        ),
        (tampered(layers=...), "layers: is missing"),
        (tampered_layer(out_orders=["a"]), r"layers\.layer1\.0\.conv1\.out_orders: the plan has no shared order 'a'"),
        (tampered_layer(out_orders="a"), r"layers\.layer1\.0\.conv1\.out_orders: must be a list"),
        (tampered(shared_orders=[1]), "shared_orders: must be a mapping"),
        (tampered(shared_orders={"a": [0, 0]}), "shared order 'a' is not a permutation"),
        (tampered_layer(pieces=0), r"layers\.layer1\.0\.conv1: pieces must be a whole number from 1 on, got 0"),
        (tampered(colour="red"), "colour: is not known here"),
        (tampered(layers=[1, 2]), r"layers: must be a mapping, got \[1, 2\]"),
        (tampered(budget=1), "budget: must be text"),
        (tampered(target=1.5), r"target must lie in \[0, 1\], got 1.5"),
        (tampered(target=1.0, removed_mac_fraction=1.0), r"target is a removed fraction and must lie in \[0, 1\)"),
        (tampered(target="0.5"), "target: must be a finite number or null, got '0.5'"),
        (tampered(target=True), "target: must be a finite number or null, got True"),
        (tampered(target=0.31), r"target 0\.31 of all macs is not met: the plan removes 0\.3"),
        (tampered(removed_mac_fraction=None), r"target 0\.25 of all macs is not met: the plan removes None"),
        (tampered(removed_mac_fraction=-0.1), r"removed_mac_fraction must lie in"),
        (tampered(min_kept_norm=1.1), r"min_kept_norm must lie in"),
        (tampered(removed_param_fraction=None), "removed_param_fraction: must be a finite number, got None"),
        (tampered(target=float("nan")), "NaN is not a number"),
        (tampered(target=0.25).replace("0.25", "1e999"), "target: must be a finite number or null, got inf"),
        (tampered(strucspars_version=1), "strucspars_version: must be text"),
        (tampered(layers={"conv": 3}), r"layers\.conv: must be an object, got 3"),
        (tampered_layer(in_perm=...), r"layers\.layer1\.0\.conv1\.in_perm: is missing"),
        (tampered_layer(colour=1), r"layers\.layer1\.0\.conv1\.colour: is not known here"),
        (tampered_layer(out_perm="01"), r"conv1\.out_perm: must be a list of whole numbers, got '01'"),
        (tampered_layer(out_perm=[0, 1, 2, 3, 4, 5, 6, True]), "out_perm: must be a list of whole numbers"),
        (tampered_layer(out_perm=[0] * 8), r"layers\.layer1\.0\.conv1: out_perm is not a permutation"),
        (tampered_layer(in_perm=[0, 1]), "conv1: in_perm must list 4 channels"),
        (tampered_layer(group_level=4), r"conv1: group_level must lie in 1\.\.3 for a 8 x 4 layer"),
        (tampered_layer(group_level=0), "conv1: group_level must be a whole number"),
        (tampered_layer(group_level=10**9), "group_level must lie in"),
        (tampered_layer(group_level=10**30), "group_level: must be a whole number"),
        (tampered_layer(weight_shape=[8]), r"weight_shape must be \(out, in, \*kernel\)"),
        (tampered_layer(weight_shape=[8, 0, 3, 3]), "weight_shape must be"),
        (tampered_layer(weight_shape=[10**12, 10**12]), "out_perm must list 1000000000000 channels"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        GroupingPlan.from_json(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_other_json_is_refused_as_a_bad_value(document: Any) -> None:
    with pytest.raises(ValueError, match="grouping plan"):
        GroupingPlan.from_json(json.dumps(document))


@given(st.data())
def test_a_truncated_file_is_refused(data: st.DataObject) -> None:
    text = random_plan().to_json()
    with pytest.raises(ValueError, match="not valid JSON"):
        GroupingPlan.from_json(text[: data.draw(st.integers(0, len(text) - 1))])


def test_a_plan_matches_only_its_network() -> None:
    plan = random_plan()
    shapes = {name: layer.weight_shape for name, layer in plan.layers.items()}
    plan.check_matches(shapes | {"fc": (10, 4)})
    plan.check_matches({name: list(shape) for name, shape in shapes.items()})
    with pytest.raises(ValueError, match=r"layer 'layer1.0.conv2': its weight is \(8, 16\).* made for \(24, 16\)"):
        plan.check_matches(shapes | {"layer1.0.conv2": (8, 16)})
    with pytest.raises(ValueError, match=r"its weight is \(8, 4, 1, 1\), but the plan was made for \(8, 4, 3, 3\)"):
        plan.check_matches(shapes | {"layer1.0.conv1": (8, 4, 1, 1)})
    shapes["layer1.0.convolution2"] = shapes.pop("layer1.0.conv2")
    with pytest.raises(ValueError, match=r"'layer1\.0\.conv2' .* not in the network; did you mean 'layer1\.0\.conv"):
        plan.check_matches(shapes)


@pytest.mark.parametrize(("planned", "present"), [("3", "module.3"), ("net.3", "3")])
def test_a_plan_for_a_part_of_a_network_or_for_one_around_it_comes_with_the_name(planned: str, present: str) -> None:
    plan = GroupingPlan({planned: random_layer(0)})
    with pytest.raises(
        ValueError, match=f"did you mean '{present}'\\? If not, give the network that the plan was made"
    ):
        plan.check_matches({"0": (8, 8), present: (8, 8)})


def test_weights_may_have_up_to_three_kernel_axes() -> None:
    orders: dict[str, Any] = {"out_perm": np.array([1, 0]), "in_perm": np.array([0, 1])}
    for kernel in ((), (3,), (3, 3), (3, 3, 3)):
        assert LayerPlan(group_level=2, weight_shape=(2, 2, *kernel), **orders).weight_shape == (2, 2, *kernel)
    with pytest.raises(ValueError, match=r"weight_shape must be \(out, in, \*kernel\)"):
        LayerPlan(group_level=2, weight_shape=(2, 2, 3, 3, 3, 3), **orders)
