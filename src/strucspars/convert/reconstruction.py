"""Refitting a compressed network to the dense one, layer by layer, from a few hundred images."""

import contextlib
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from strucspars.channels.tracing import ORIGIN_KEY, FoldedGraph, asks_for_shape, has_plain_forward, traced
from strucspars.convert.comparison import relative_error
from strucspars.cost.counting import uncompiled, undisturbed
from strucspars.nn.batch_norms import is_batch_norm, modules_after_norm
from strucspars.nn.names import bare_modules, unwrapped
from strucspars.nn.narrowing import narrowed_from
from strucspars.nn.refit import MAX_SAMPLES, PatchMoments, can_be_refitted, in_double
from strucspars.sparsify.calibration import (
    Calibration,
    CalibrationBatch,
    OnProgress,
    device_of,
    hooked,
    ignore_progress,
)

logger = logging.getLogger(__name__)

ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
# A graph keeps its activations in half precision.
GRAPH_TOLERANCE = 0.02


# `samples()` yields for every batch what a layer reads, in the network as compressed so far, and the wanted outputs.
Samples = Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]
# `refit(layer, samples, scale)` fits the layer, whose weight counts times `scale`, and gives the mean target.
Refit = Callable[[nn.Module, Samples, torch.Tensor | None], torch.Tensor]


def reconstruct_(
    model: nn.Module,
    dense: nn.Module,
    batches: Iterable[CalibrationBatch] | Calibration,
    *,
    ridge: float | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Refit the weights of a compressed network to the outputs of the dense one, in place, without training.

    Goes through the layers in forward order. Every layer reads what the network compressed so far gives, and its weight
    becomes the ridge solution that comes nearest to the dense layer's outputs, batch norm included; the last layer of a
    residual branch also makes up for the error of the shortcut. Layers that stay dense are refitted too. The batch
    norms get the statistics of their new inputs, so that recalibration afterwards changes nothing.

    Args:
        model: the compressed network.
        dense: the network it was made from; unchanged.
        batches: a few hundred images, or pairs of images and labels; at most the first 1,024 images are used.
        ridge: how strongly the weights are drawn to the present ones, as a fraction of the inputs' mean square; None
            takes for every layer what does best on a quarter of the images that the others do not know.
        on_progress: called as `on_progress(what, done, total)`.

    Raises:
        ValueError: there are no batches, or the networks do not have the same layers.

    >>> import copy
    >>> import strucspars as ss
    >>> dense = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    >>> model, images = copy.deepcopy(dense), [torch.randn(16, 8, 9, 9) for _ in range(4)]
    >>> model = ss.convert_(model, ss.one_shot_plan(dense, target=0.5))
    >>> error = (model(images[0]) - dense(images[0])).square().mean()
    >>> reconstruct_(model, dense, images)
    >>> bool((model(images[0]) - dense(images[0])).square().mean() < error)
    True
    """
    model, dense, progress = unwrapped(model), unwrapped(dense), on_progress or ignore_progress
    data = Calibration.of(batches, name="batches").on(device_of(model))
    names = {name for name, module in bare_modules(dense) if can_be_refitted(module)}
    for name, module in bare_modules(model):
        if can_be_refitted(module) and name not in names:
            raise ValueError(f"layer {name!r} is not in the dense network; give the network that was compressed")

    def refit(layer: nn.Module, samples: Samples, scale: torch.Tensor | None) -> torch.Tensor:
        moments = PatchMoments(layer, max_positions=-(-MAX_SAMPLES // len(data)))
        for place, (inputs, wanted) in enumerate(samples()):
            moments.add(inputs, wanted, held_out=data.is_held_out(place))
        _fit_(layer, moments, ridge, scale)
        return moments.target_mean

    with undisturbed(model), undisturbed(dense), uncompiled(model), uncompiled(dense):
        if (graphs := _traced_alike(model, dense, data)) is not None:
            _refit_along_(graphs, data, refit, progress)
        else:
            _refit_by_hooks_(model, dense, data, refit, progress)


def _fit_(layer: nn.Module, moments: PatchMoments, ridge: float | None, scale: torch.Tensor | None) -> None:
    """Write the solution into the layer."""
    weight, bias = layer.get_parameter("weight"), layer._parameters.get("bias")
    start = weight.data
    if scale is not None:
        start = start * scale.to(start.dtype).view(-1, *[1] * (start.dim() - 1))
    fitted = moments.fitted(start, ridge=ridge, has_bias=scale is not None or bias is not None)
    weight.data.copy_(fitted)
    if bias is not None:
        # A norm after the layer has the constant part.
        shift = moments.target_mean - moments.output_mean(fitted) if scale is None else torch.zeros(())
        bias.data.copy_(shift.expand(bias.shape))


def _renormalise_(norm: nn.Module, inputs: Iterable[torch.Tensor], wanted_mean: torch.Tensor | None = None) -> None:
    """Give a norm the statistics of its inputs, and the affine map with which it computes what it did before.

    With a wanted mean it only moves the inputs there instead.
    """
    batch_norm = cast(nn.BatchNorm2d, norm)
    count, center, sums = 0, None, torch.zeros(())
    for batch in inputs:
        values = batch.movedim(1, -1).flatten(0, -2)
        center = values.mean(0) if center is None else center
        count += len(values)
        sums = sums + in_double(torch.stack([(values - center).sum(0), (values - center).square().sum(0)]))
    assert center is not None, "there are batches"
    shift, square = sums / count
    mean, variance = center.to(shift) + shift, (square - shift.square()).clamp_min(0)
    scale, offset = (torch.ones_like(mean), wanted_mean) if wanted_mean is not None else _affine(norm)
    for name, new in {
        "running_mean": mean,
        "running_var": variance,
        "weight": scale * (variance + batch_norm.eps).sqrt(),
        "bias": offset if wanted_mean is not None else offset + scale * mean,
    }.items():
        getattr(norm, name).data.copy_(new)


def _affine(norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift by which a norm maps its inputs in evaluation."""
    batch_norm, scale = cast(nn.BatchNorm2d, norm), _scale(norm)
    return scale, batch_norm.bias.data - cast(torch.Tensor, batch_norm.running_mean) * scale


def _scale(norm: nn.Module) -> torch.Tensor:
    batch_norm = cast(nn.BatchNorm2d, norm)
    return batch_norm.weight.data * (cast(torch.Tensor, batch_norm.running_var) + batch_norm.eps).rsqrt()


def _normalised(norm: nn.Module, outputs: torch.Tensor) -> torch.Tensor:
    """What the norm itself gives, without an activation that its module may have."""
    shape = (1, -1, *[1] * (outputs.dim() - 2))
    scale, shift = _affine(norm)
    return outputs * scale.view(shape) + shift.view(shape)


class _Activations:
    """The values of a graph for all batches, computed node by node, and kept in half precision while needed."""

    def __init__(self, graph_module: fx.GraphModule, inputs: Iterable[torch.Tensor]) -> None:
        self._interpreter = fx.Interpreter(graph_module, garbage_collect_values=False)
        self._device = device_of(graph_module)
        self._inputs = list(inputs)
        self._values: dict[fx.Node, list[Any]] = {}

    def value(self, node: fx.Node, place: int) -> Any:
        """What a node has given for a batch."""
        return pytree.tree_map_only(
            _Halved, lambda kept: kept.tensor.to(self._device, kept.dtype), self._values[node][place]
        )

    def compute(self, node: fx.Node) -> None:
        """Compute a node for all batches; forget values that no later node reads."""
        self._take(node, [_kept(self._run(node, place)) for place in range(len(self._inputs))])

    def copy(self, node: fx.Node, others: "_Activations", other: fx.Node) -> None:
        """Take over what a node of another graph has given."""
        self._take(node, others._values[other])

    def _take(self, node: fx.Node, values: list[Any]) -> None:
        self._values[node] = values
        for source in node.all_input_nodes:
            if all(user in self._values for user in source.users):
                self._values[source] = []

    def _run(self, node: fx.Node, place: int) -> Any:
        if node.op == "placeholder":
            return self._inputs[place].to(self._device)
        self._interpreter.env = {source: self.value(source, place) for source in node.all_input_nodes}
        return self._interpreter.run_node(node)


@dataclass(frozen=True, eq=False)
class _Halved:
    tensor: torch.Tensor
    dtype: torch.dtype


def _kept(value: Any) -> Any:
    def halved(tensor: torch.Tensor) -> _Halved:
        half = tensor.half() if tensor.is_floating_point() else tensor
        # Not every network stays below 65,504. In-place operations must not change what is kept.
        fits = not tensor.is_floating_point() or bool(half.sum(dtype=torch.float32).isfinite())
        return _Halved(half if fits else tensor.clone(), tensor.dtype)

    return pytree.tree_map_only(torch.Tensor, halved, value)


def _traced_alike(model: nn.Module, dense: nn.Module, data: Calibration) -> list[FoldedGraph] | None:
    """The graphs of both networks; None, with a line in the log, where they cannot be traced."""
    example = data.images[0][:2].to(device_of(model))
    try:
        graphs = [traced(network, (example,)) for network in (model, dense)]
        pairs = zip(graphs[0].graph.nodes, graphs[1].graph.nodes, strict=True)
        alike = all(_match(*pair) for pair in pairs)
        wrong = "" if alike else "the graphs of both networks differ"
        wrong = wrong or _wrong(graphs[0], model, example) or _wrong(graphs[1], dense, example)
    # Tracing runs the network's own code on symbols, which can raise any error.
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}".splitlines()[0]
    if wrong:
        logger.warning(
            "the network could not be traced, so that its layers are refitted one by one, which takes longer, without "
            "their batch norms and without the error of shortcuts: %s",
            wrong,
        )
        return None
    return graphs


def _match(one: fx.Node, other: fx.Node) -> bool:
    return (one.op, str(one.target), one.name) == (other.op, str(other.target), other.name)


def _wrong(graph: fx.GraphModule, network: nn.Module, example: torch.Tensor) -> str:
    """How a graph, computed node by node, differs from the network: it may change tensors that it reads later."""
    values = _Activations(graph, [example])
    for node in graph.graph.nodes:
        values.compute(node)
    found, expected = (pytree.tree_leaves(each) for each in (values.value(node, 0), network(example.clone())))
    errors = [
        relative_error(one, other)
        for one, other in zip(found, expected, strict=True)
        if isinstance(other, torch.Tensor) and other.is_floating_point()
    ]
    return "" if max(errors, default=0) <= GRAPH_TOLERANCE else "the graph computes something else"


def _refit_along_(graphs: Sequence[fx.GraphModule], data: Calibration, refit: Refit, progress: OnProgress) -> None:
    """Compute both graphs node by node, and refit every layer on the way that reads or computes something else."""
    ours, theirs = (_Activations(graph, data.images) for graph in graphs)
    pairs = dict(zip(graphs[0].graph.nodes, graphs[1].graph.nodes, strict=True))
    seen, changed, normed = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    batches = range(len(data.images))
    for done, (node, dense_node) in enumerate(pairs.items()):
        theirs.compute(dense_node)
        layer = graphs[0].get_submodule(str(node.target)) if node.op == "call_module" else None
        if changed.isdisjoint(node.all_input_nodes) and _compute_alike(graphs, node):
            ours.copy(node, theirs, dense_node)
        elif layer is None or not _can_be_fitted(layer, node):
            if layer is not None and node not in normed and _can_be_renormed(layer, node):
                source = node.all_input_nodes[0]
                _renormalise_(layer, (ours.value(source, batch) for batch in batches))
            changed.add(node)
            ours.compute(node)
        else:
            norm_node = _norm_after(graphs[0], node)
            norms = [] if norm_node is None else [graph.get_submodule(str(norm_node.target)) for graph in graphs]
            shortcut = _shortcut(graphs[0], norm_node or node, seen)

            def samples(
                layer: nn.Module = layer,
                source: fx.Node = node.all_input_nodes[0],
                dense_node: fx.Node = dense_node,
                norms: list[nn.Module] = norms,
                shortcut: fx.Node | None = shortcut,
            ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
                for batch in batches:
                    wanted = theirs.value(dense_node, batch)
                    if norms:
                        wanted = _normalised(norms[1], wanted)
                    wanted = _of_those_that_stay(layer, wanted)
                    if shortcut is not None:
                        beside = _of_those_that_stay(layer, theirs.value(pairs[shortcut], batch))
                        wanted = wanted + beside - ours.value(shortcut, batch)
                    yield ours.value(source, batch), wanted

            changed.add(node)
            wanted_mean = refit(layer, samples, _scale(norms[0]) if norms else None)
            ours.compute(node)
            if norm_node is not None:
                _renormalise_(norms[0], (ours.value(node, batch) for batch in batches), wanted_mean)
                normed.add(norm_node)
        seen.add(node)
        progress("reconstruction", done + 1, len(pairs))


def _of_those_that_stay(layer: nn.Module, outputs: torch.Tensor) -> torch.Tensor:
    """The outputs of the dense layer in the channels that the compressed one has."""
    record = narrowed_from(layer)
    if record is None or (places := record.kept.outputs) is None:
        return outputs
    axis = -1 if isinstance(layer, nn.Linear) else -1 - len(cast(nn.Conv2d, layer).kernel_size)
    return outputs.index_select(axis, torch.from_numpy(places).to(outputs.device))


def _compute_alike(graphs: Sequence[fx.GraphModule], node: fx.Node) -> bool:
    """Whether a node computes the same in both graphs, given the same inputs."""
    if node.op == "get_attr":
        return torch.equal(*(operator.attrgetter(str(node.target))(graph) for graph in graphs))
    if node.op != "call_module":
        return True
    one, other = (graph.get_submodule(str(node.target)) for graph in graphs)
    states = [module.state_dict() for module in (one, other)]
    same_names = type(one) is type(other) and states[0].keys() == states[1].keys()
    return same_names and all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def _can_be_fitted(layer: nn.Module, node: fx.Node) -> bool:
    # A copy stands for one of several calls, which share a weight.
    reads_one = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
    return can_be_refitted(layer) and has_plain_forward(layer) and ORIGIN_KEY not in node.meta and reads_one


def _only_user(node: fx.Node) -> fx.Node | None:
    users = [user for user in node.users if not asks_for_shape(user)]
    return users[0] if len(users) == 1 else None


def _norm_after(graph: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The batch norm that alone reads a layer's outputs, if its statistics and affine map can be rewritten."""
    user = _only_user(node)
    if user is None or user.op != "call_module":
        return None
    return user if _can_be_renormed(graph.get_submodule(str(user.target)), user) else None


def _can_be_renormed(norm: nn.Module, node: fx.Node) -> bool:
    """Whether a node is the only call of a batch norm that has statistics and an affine map."""
    known = type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) or modules_after_norm(norm) is not None
    tensors = [getattr(norm, name, None) for name in ("weight", "bias", "running_mean", "running_var")]
    fits = known and is_batch_norm(norm) and has_plain_forward(norm) and all(each is not None for each in tensors)
    return fits and ORIGIN_KEY not in node.meta


def _shortcut(graph: fx.GraphModule, node: fx.Node, seen: set[fx.Node]) -> fx.Node | None:
    """What is added to the outputs of a node, and to nothing else of them, if it is computed before."""
    user = _only_user(node)
    while user is not None and user.op == "call_module" and _does_nothing(graph.get_submodule(str(user.target))):
        node, user = user, _only_user(user)
    if node.op == "call_module" and any(
        not _does_nothing(after) for after in (modules_after_norm(graph.get_submodule(str(node.target))) or {}).values()
    ):
        return None
    if user is None or user.target not in ADDITIONS or len(user.args) != 2 or user.kwargs:
        return None
    others = [other for other in user.args if other is not node]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) and others[0] in seen else None


def _does_nothing(module: nn.Module) -> bool:
    """Whether a module gives its inputs in evaluation."""
    return isinstance(module, nn.Identity | nn.Dropout | nn.Dropout2d)


def _refit_by_hooks_(model: nn.Module, dense: nn.Module, data: Calibration, refit: Refit, progress: OnProgress) -> None:
    """Refit the layers that are called once, in the order of their calls; run both networks up to each of them."""
    ours, theirs = (dict(bare_modules(each)) for each in (model, dense))
    names = {module: name for name, module in ours.items() if can_be_refitted(module) and has_plain_forward(module)}
    calls: list[nn.Module] = []
    with hooked(names, lambda module, _, __: calls.append(module)):
        model(data.images[0][:2].to(device_of(model)))
    once = [module for module in calls if calls.count(module) == 1]
    for done, module in enumerate(once):

        def samples(module: nn.Module = module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for images in data.images:
                inputs, _ = _call_of(model, module, images.to(device_of(model)))
                outputs = _call_of(dense, theirs[names[module]], images.to(device_of(dense)))[1]
                yield inputs, _of_those_that_stay(module, outputs)

        refit(module, samples, None)
        progress("reconstruction", done + 1, len(once))


class _ReachedError(Exception):
    """Stops a forward pass once the layer in question has been called."""


def _call_of(network: nn.Module, module: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a layer in a forward pass, which stops there."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def stop(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        found.append((inputs[0], output))
        raise _ReachedError

    with hooked([module], stop), contextlib.suppress(_ReachedError):
        network(images)
    return found[0]
