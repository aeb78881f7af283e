"""Seams in a graph of fused convolutions: a 1x1 convolution, its shortcut and the next 1x1 convolution as one call."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, fx, nn

from strucspars.channels.tracing import free_name
from strucspars.convert.fusion import ConvStep
from strucspars.kernels.seam import Seam, SeamOutputs, seam_reference


@dataclass(frozen=True)
class SeamSite:
    """The calls of a seam: its first convolution, and of the others those that there are."""

    first: fx.Node
    shortcut: fx.Node | None
    second: fx.Node | None

    def parts(self) -> Iterator["SeamSite"]:
        """The seams of all three, or of the first and one other."""
        if self.shortcut is not None and self.second is not None:
            yield self
        if self.shortcut is not None:
            yield SeamSite(self.first, self.shortcut, None)
        if self.second is not None:
            yield SeamSite(self.first, None, self.second)


@final
class SeamStep(nn.Module):
    """A seam in a graph; `run` computes it, by plain operations until another implementation is set."""

    def __init__(self, name: str, seam: Seam) -> None:
        super().__init__()
        self.name = name
        self.seam = seam
        self.run: Any = partial(seam_reference, seam)

    def forward(self, narrow: Tensor, other: Tensor | None = None) -> SeamOutputs:
        """Compute all convolutions of the seam."""
        outputs: SeamOutputs = self.run(narrow, other)
        return outputs


def seam_sites(steps: Mapping[fx.Node, ConvStep]) -> Iterator[SeamSite]:
    """The places where convolutions could be computed together, none of them in two."""
    taken: set[fx.Node] = set()
    for first, step in steps.items():
        if first in taken or not step.conv.is_pointwise:
            continue
        added = first.args[1] if len(first.args) > 1 else None
        shortcut = added if isinstance(added, fx.Node) and added in steps and len(added.users) == 1 else None
        if shortcut is not None and (len(shortcut.args) > 1 or shortcut in taken):
            shortcut = None
        readers = (user for user in first.users if user in steps and user.args == (first,) and user not in taken)
        second = next((user for user in readers if steps[user].conv.is_pointwise), None)
        if shortcut is not None or second is not None:
            taken.update(node for node in (first, shortcut, second) if node is not None)
            yield SeamSite(first, shortcut, second)


def seam_of(site: SeamSite, steps: Mapping[fx.Node, ConvStep]) -> Seam:
    """The convolutions of a seam."""

    def conv(node: fx.Node | None) -> Any:
        return None if node is None else steps[node].conv

    return Seam(first=conv(site.first), shortcut=conv(site.shortcut), second=conv(site.second))


def join_seam_(graph_module: fx.GraphModule, site: SeamSite, steps: Mapping[fx.Node, ConvStep]) -> SeamStep:
    """Replace the calls of a seam by one, in place."""
    names = [steps[node].name for node in (site.shortcut, site.first, site.second) if node is not None]
    step = SeamStep(" + ".join(names), seam_of(site, steps))
    name = free_name(graph_module, str(site.first.target))
    graph_module.add_submodule(name, step)
    narrow, *others = site.first.args
    if site.shortcut is not None:
        others = [site.shortcut.args[0]]
    with graph_module.graph.inserting_after(site.first):
        call = graph_module.graph.call_module(name, (narrow, *others))
    places = {site.first: 0} | ({} if site.second is None else {site.second: 1})
    for node, place in places.items():
        with graph_module.graph.inserting_after(call):
            part = graph_module.graph.call_function(operator.getitem, (call, place))
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
    for replaced in (site.second, site.first, site.shortcut):
        if replaced is not None:
            graph_module.graph.erase_node(replaced)
    graph_module.graph.lint()
    graph_module.recompile()
    return step
