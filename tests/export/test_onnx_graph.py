"""Changes to a graph reach every corner of it."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from strucspars.export.onnx import (
    drop_origins_,
    name_batch_axis_,
    rename_values_,
)


def value(name: str, *shape: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)


def branch(result: str) -> onnx.GraphProto:
    nodes = [helper.make_node("Neg", ["x"], ["images"]), helper.make_node("Add", ["images", "images_1"], [result])]
    return helper.make_graph(nodes, result, [], [value(result, "s7", 4)], value_info=[value("images", "s7", 4)])


def branching() -> onnx.ModelProto:
    """Two branches that read from outside, with values of the names that its input is to get."""
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch("then"), else_branch=branch("else"))
    constants = [
        numpy_helper.from_array(np.array(True), "flag"),
        numpy_helper.from_array(np.ones(4, np.float32), "images_1"),
    ]
    graph = helper.make_graph([node], "branching", [value("x", "s7", 4)], [value("y", "s7", 4)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def branches(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    return [attribute.g for attribute in model.graph.node[0].attribute]


def test_names_are_changed_inside_branches_and_among_constants_too() -> None:
    model = branching()
    rename_values_(model.graph, ["images"], ["flag"])
    onnx.checker.check_model(model, full_check=True)
    assert [constant.name for constant in model.graph.initializer] == ["flag_1", "images_1"]
    assert (model.graph.node[0].input, model.graph.node[0].output) == (["flag_1"], ["flag"])
    for inner in branches(model):
        assert [list(node.input) for node in inner.node] == [["images"], ["images_2", "images_1"]]
        assert [known.name for known in inner.value_info] == ["images_2"]


def test_what_is_known_of_inner_values_calls_the_batch_by_its_name_too() -> None:
    graph = helper.make_graph(
        [], "sizes", [value("images", "s7", 3)], [value("output", "s7", 3)], value_info=[value("inner", "s7", 6)]
    )
    name_batch_axis_(graph, [True])
    assert graph.value_info[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize("is_batched", [False, True])
def test_where_no_batch_varies_no_size_is_called_one(is_batched: bool) -> None:
    graph = helper.make_graph([], "sizes", [value("images", 2, "u0")], [value("output", 2, "u0")])
    name_batch_axis_(graph, [is_batched])
    assert [each.type.tensor_type.shape.dim[1].dim_param for each in (*graph.input, *graph.output)] == ["u0", "u0"]


def test_no_corner_of_a_graph_keeps_its_origins() -> None:
    model, folder = branching(), "/home/someone"
    model.graph.metadata_props.add(key="from", value=folder)
    for graph in (model.graph, *branches(model)):
        for item in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            item.metadata_props.add(key="from", value=folder)
            item.doc_string = folder
    drop_origins_(model)
    assert folder.encode() not in model.SerializeToString()
