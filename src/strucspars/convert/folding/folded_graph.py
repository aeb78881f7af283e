"""The type of a folded graph, which keeps its report when it is saved; and the graph of what cannot be traced."""

from collections.abc import Callable
from typing import Any

from torch import fx, nn


class FoldedGraph(fx.GraphModule):
    """A graph whose `meta`, where the report is, survives pickling as it survives copying."""

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle stores: what it would store of any graph, and the meta, which PyTorch leaves out."""
        return _restored, (*super().__reduce__(), type(self).__name__, self.meta)


def _restored(
    restore: Callable[..., fx.GraphModule], arguments: tuple[Any, ...], name: str, meta: dict[str, Any]
) -> FoldedGraph:
    graph_module = restore(*arguments)
    folded = FoldedGraph(graph_module, graph_module.graph, name)
    folded.meta = meta
    return folded


def graph_of_one_call(model: nn.Module, num_inputs: int) -> FoldedGraph:
    """A graph that does nothing but call the model."""
    root = nn.Module()
    root.model = model
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(f"input_{place}") for place in range(1, num_inputs + 1))
    graph.output(graph.call_module("model", inputs))
    return FoldedGraph(root, graph, type(model).__name__)
