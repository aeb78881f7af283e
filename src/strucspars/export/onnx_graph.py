"""Changes to an ONNX graph, in place, and questions to it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import onnx

BATCH_AXIS = "batch"

# The entries of a channel shuffle.
Order = tuple[int, ...]


def rename_values_(graph: onnx.GraphProto, input_names: Sequence[str], output_names: Sequence[str]) -> None:
    """Give the inputs and outputs these names; inner values that have one of them already get another."""
    chosen = dict(zip([value.name for value in graph.input], input_names, strict=True))
    chosen |= dict(zip([value.name for value in graph.output], output_names, strict=True))
    wanted, taken = set(chosen.values()), set(_value_names(graph)) | set(chosen.values())
    for name in sorted((wanted & set(_value_names(graph))) - set(chosen)):
        chosen[name] = next(free for number in range(1, len(taken) + 2) if (free := f"{name}_{number}") not in taken)
        taken.add(chosen[name])
    for each in _graphs(graph):
        for value in (*each.input, *each.output, *each.value_info, *each.initializer):
            value.name = chosen.get(value.name, value.name)
        for node in each.node:
            for names in (node.input, node.output):
                names[:] = [chosen.get(name, name) for name in names]


def name_batch_axis_(graph: onnx.GraphProto, is_batched: Sequence[bool]) -> None:
    """Call the varying first axis of the inputs, and every size that depends on it, by its name."""
    symbols = {
        value.type.tensor_type.shape.dim[0].dim_param
        for value, batched in zip(graph.input, is_batched, strict=True)
        if batched
    }
    whole_word = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in sorted(symbols) if symbol) or r"(?!)")
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = whole_word.sub(BATCH_AXIS, size.dim_param)


def drop_origins_(model: onnx.ModelProto) -> None:
    """Remove what the exporter notes about every value: code, and folders of the machine that exports."""
    del model.graph.metadata_props[:]
    for graph in _graphs(model.graph):
        for item in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del item.metadata_props[:]
            item.doc_string = ""


def count_axes_from_the_end_(graph: onnx.GraphProto) -> None:
    """Let every Gather along axis 1 count that axis from the end, where its rank is known: the same function."""
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.output, *graph.value_info)
        if value.type.tensor_type.HasField("shape")
    }
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Gather" else ():
            if attribute.name == "axis" and attribute.i == 1 and node.input[0] in ranks:
                attribute.i -= ranks[node.input[0]]


def check_one_gather_per_shuffle(graph: onnx.GraphProto, exported: torch.export.ExportedProgram) -> None:
    """Raise a `ValueError` unless every `index_select` by a constant order became one Gather by that order.

    The exporter may merge two that are the same, and drops what no output needs; other ways to write them are several
    times slower.
    """
    wanted, found = selected_orders(exported), gathered_orders(graph)
    for order, number in wanted.items():
        if not 1 <= found[order] <= number:
            raise ValueError(
                f"this version of torch ({torch.__version__}) wrote {number} shuffles of {len(order)} channels as "
                f"{found[order]} Gather operations; use torch 2.11 or 2.15, with which this is tested"
            )


def selected_orders(exported: torch.export.ExportedProgram) -> Counter[Order]:
    """How often a program selects by each constant order on the way from its inputs to its outputs."""
    signature = exported.graph_signature
    constants = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    orders: Counter[Order] = Counter()
    for node in _on_the_way(exported):
        index = node.args[2] if node.target is torch.ops.aten.index_select.default else None
        if isinstance(index, torch.fx.Node) and index.name in constants:
            name = constants[index.name]
            tensor = exported.state_dict.get(name, exported.constants.get(name))
            assert isinstance(tensor, torch.Tensor)
            orders[tuple(tensor.tolist())] += 1
    return orders


def _on_the_way(exported: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """The nodes that depend on an input, and that an output depends on: neither constant nor unused."""
    varying, needed = set(exported.graph_signature.user_inputs), set()
    nodes = list(exported.graph.nodes)
    for node in nodes:
        if any(source.name in varying for source in node.all_input_nodes):
            varying.add(node.name)
    for node in reversed(nodes):
        if node.op == "output" or node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in nodes if node.name in varying and node in needed]


def gathered_orders(graph: onnx.GraphProto) -> Counter[Order]:
    """How often a graph gathers by each constant order."""
    constants = _whole_number_vectors(graph)
    return Counter(
        constants[node.input[1]] for node in graph.node if node.op_type == "Gather" and node.input[1] in constants
    )


def _whole_number_vectors(graph: onnx.GraphProto) -> Mapping[str, Order]:
    from onnx import numpy_helper

    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    arrays = {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items() if len(tensor.dims) == 1}
    return {name: tuple(array.tolist()) for name, array in arrays.items() if np.issubdtype(array.dtype, np.integer)}


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and all graphs inside its nodes: branches and loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                yield from _graphs(inner)


def _value_names(graph: onnx.GraphProto) -> Iterator[str]:
    for each in _graphs(graph):
        yield from (value.name for value in (*each.input, *each.initializer))
        for node in each.node:
            yield from (name for name in node.output if name)
