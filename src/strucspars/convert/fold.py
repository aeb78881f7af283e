"""`fold`: an inference graph of exactly the same function, with as few channel shuffles as possible.

Batch norms go into the layers before them, narrow groups can become wider ones with zeros between them, and
`convert.reordering` moves the shuffles into the weights.
"""

import copy
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from strucspars.channels.rules import BATCH_NORMS
from strucspars.channels.tracing import (
    FoldedGraph,
    asks_for_shape,
    graph_of_one_call,
    has_plain_forward,
    inference_copy,
    other_norms_as_modules_,
    tensor_shape,
    traced,
)
from strucspars.convert.comparison import compare_outputs, random_arguments
from strucspars.convert.conversion import plan_of, unmask_
from strucspars.convert.reordering import absorb_shuffles_, merge_calls_
from strucspars.core.checks import checked_at_least
from strucspars.cost.counting import BeforeAfter, ExampleInputs, arguments_of, fresh_arguments, undisturbed
from strucspars.cost.gathers import (
    FOLDED_PLAN_KEY,
    REPORT_KEY,
    FoldReport,
    RemainingGather,
    WidenedLayer,
    is_folded,
    shuffles_in_pass,
)
from strucspars.nn.batch_norms import is_batch_norm
from strucspars.nn.groupable import is_plain
from strucspars.nn.layers import (
    DENSE_AND_GROUPED_TYPES,
    channel_orders,
    channels,
    flush_denormals_,
    forms_of,
    groups_of_weight,
    is_grouped,
    like_memory_format,
    merged_weight,
)
from strucspars.nn.names import copied, unwrap_children_, unwrapped

logger = logging.getLogger(__name__)

Reported = TypeVar("Reported", RemainingGather, WidenedLayer)


def fold(model: nn.Module, example_inputs: ExampleInputs, *, widen_groups_below: int = 1) -> fx.GraphModule:
    """Make the inference graph of a network: batch norms folded, channel shuffles moved into the weights around them.

    Shuffles move through operations that treat all channels in the same way (activations, pooling, batch norm,
    additions, concatenation, flattening) into dense layers, or cancel the shuffle of the next grouped layer; each that
    remains is one `index_select`. The graph is compared with the model on the example inputs and on random ones, these
    in double precision if the model can be computed in it, in two calls each. If a network cannot be traced, or differs
    from its graph, the result is a graph of one call that keeps all shuffles, batch norms and groups; `fold_report`
    says why.

    Args:
        model: converted, masked or dense, in either mode; it does not change. Wrappers around it or parts of it
            (`torch.compile`, `DataParallel`, `DistributedDataParallel`, activation checkpointing, Fabric) are removed,
            from the names too. The graph is always in eval mode, shares no tensors with the model, and takes any batch
            size if the model's code does. For a folded graph, the result is a copy.
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`. The graph takes as many; further
            arguments stay at their defaults. Axes may have other lengths later, where the model's code allows it, but
            not several channels in place of one: a mask of one channel is the same for all, in any order.
        widen_groups_below: layers whose groups are narrower, on either side, run with fewer and wider groups:
            neighbours become one, with zeros between them. More multiply-accumulates, but faster in runtimes that lose
            their speed on narrow groups, as ONNX Runtime does below 16 channels. Depthwise convolutions of the network
            itself stay.

    >>> import torch
    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 5, 1))
    >>> images = torch.randn(2, 3, 8, 8)
    >>> model = ss.convert_(model, ss.one_shot_plan(model, target=0.3))
    >>> folded = fold(model, images)
    >>> print(ss.fold_report(folded))
    no gathers remain
    >>> torch.allclose(folded(images), model.eval()(images), atol=1e-5)
    True
    """
    min_width = checked_at_least("widen_groups_below", widen_groups_below, 1)
    model = unwrapped(model)
    arguments = arguments_of(model, example_inputs)
    if is_folded(model):
        if min_width > 1:
            raise ValueError(f"widen_groups_below={min_width} comes too late for a folded graph; fold the network")
        return copy.deepcopy(model)
    called = _inference_copy(model)
    with undisturbed(called):
        expected = called(*fresh_arguments(arguments))
        try:
            folded, report = _folded(_inference_copy(model), arguments, min_width)
            wrong = _wrong(folded(*fresh_arguments(arguments)), expected)
            wrong = wrong or _wrong_in_another_call(folded, called, arguments)
            wrong = wrong or _wrong_on_random_inputs(model, arguments, min_width)
        # Tracing runs the model's own code on symbols, which can raise any error.
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        if wrong:
            logger.warning("the network could not be traced, so that its shuffles stay: %s", wrong)
            folded, report = _unfolded(model, arguments, wrong)
    folded.meta[REPORT_KEY], folded.meta[FOLDED_PLAN_KEY] = report, plan_of(model)
    return folded.requires_grad_(False)


def _wrong(outputs: object, expected: object, *, whole_numbers: bool = False) -> str:
    complaint = compare_outputs(outputs, expected, whole_numbers=whole_numbers).complaint
    return f"the graph is not known to compute the same: {complaint}" if complaint else ""


def _wrong_in_another_call(folded: fx.GraphModule, called: nn.Module, arguments: tuple[Any, ...]) -> str:
    """How graph and network differ in their next call: the network may have a memory."""
    wrong = _wrong(folded(*fresh_arguments(arguments)), called(*fresh_arguments(arguments)))
    return f"{wrong}, once both were called before: does the network keep something from call to call?" if wrong else ""


def _wrong_on_random_inputs(model: nn.Module, arguments: tuple[Any, ...], min_width: int) -> str:
    """How graph and network differ on random inputs, in double precision, else in their own; empty if not."""
    for in_double in (True, False):
        called, folded_model = _inference_copy(model), _inference_copy(model)
        if in_double:
            called, folded_model = called.double(), folded_model.double()
        inputs, others = (random_arguments(arguments, in_double=in_double, seed=seed) for seed in (0, 1))
        try:
            expected = called(*fresh_arguments(inputs))
        # The network may reject this precision, or random values.
        except Exception:
            continue
        folded, _ = _folded(folded_model, inputs, min_width)
        wrong = _wrong(folded(*fresh_arguments(inputs)), expected, whole_numbers=in_double)
        return wrong or _wrong_in_another_call(folded, called, others)
    return ""


def _inference_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode that shares no tensors, with masked layers as dense ones."""
    inference = inference_copy(model)
    unmask_(inference)
    return inference


def _folded(model: nn.Module, arguments: tuple[Any, ...], min_width: int) -> tuple[fx.GraphModule, FoldReport]:
    unwrap_children_(model)
    graph_module = traced(model, fresh_arguments(arguments))
    other_norms_as_modules_(graph_module)
    fold_batch_norms_(graph_module)
    called = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_module"]
    widened = widen_groups_(graph_module, called, widen_groups_below=min_width)
    gathers = absorb_shuffles_(graph_module)
    names = merge_calls_(graph_module)
    graph_module.graph.lint()
    # The same graph with no other modules, parameters and buffers than its nodes use. A layer of which the graph only
    # reads a tensor becomes a module that holds the tensor.
    graph_module = FoldedGraph(graph_module, graph_module.graph, type(graph_module).__name__)
    graph_module.eval()

    def renamed(layers: tuple[Reported, ...]) -> tuple[Reported, ...]:
        return tuple(replace(layer, layer=names.get(layer.layer, layer.layer)) for layer in layers)

    return graph_module, FoldReport(
        gathers=renamed(gathers),
        num_kept_batch_norms=_num_batch_norms(graph_module),
        untraced_reason="",
        # Once for all calls of a layer.
        widened=tuple(dict.fromkeys(renamed(widened))),
    )


def _unfolded(model: nn.Module, arguments: tuple[Any, ...], reason: str) -> tuple[fx.GraphModule, FoldReport]:
    """The network behind a graph of one call."""
    inference = _inference_copy(model)
    # Run a copy: a network may keep state from call to call, and the result must start without it.
    gathers = shuffles_in_pass(copied(inference), fresh_arguments(arguments))
    graph_module = graph_of_one_call(inference, len(arguments))
    graph_module.eval()
    norms = _num_batch_norms(inference)
    return graph_module, FoldReport(gathers=gathers, num_kept_batch_norms=norms, untraced_reason=reason)


def _num_batch_norms(model: nn.Module) -> int:
    return sum(map(is_batch_norm, model.modules()))


def fold_into_layer_(layer: nn.Module, norm: nn.BatchNorm2d) -> None:
    """Let a convolution or linear layer compute the batch norm after it too, in place. Denormals become zero."""
    weight, bias = layer.get_parameter("weight"), layer._parameters["bias"]

    def doubled(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().double()

    mean, variance = cast(torch.Tensor, norm.running_mean), cast(torch.Tensor, norm.running_var)
    scale, shift = doubled(norm.weight), doubled(norm.bias)
    # The same for a linear layer, whose weight has no kernel axes.
    fused, fused_bias = fuse_conv_bn_weights(
        weight.detach().double(), doubled(bias), mean.double(), variance.double(), norm.eps, scale, shift
    )
    weight.data = like_memory_format(fused.detach().to(weight.dtype), weight.data)
    layer.bias = nn.Parameter(fused_bias.detach().to(weight.dtype))
    flush_denormals_(weight.data)
    flush_denormals_(layer.bias.data)


def fold_batch_norms_(graph_module: fx.GraphModule) -> None:
    """Fold every batch norm that directly follows a layer with no other readers, in place."""
    for node in list(graph_module.graph.nodes):
        source = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module":
            continue
        if any(user is not node and not asks_for_shape(user) for user in source.users):
            continue
        norm, layer = graph_module.get_submodule(node.target), graph_module.get_submodule(str(source.target))
        # Without running statistics a norm normalises by the batch, in eval mode too.
        is_fixed = type(norm) in BATCH_NORMS and norm.running_mean is not None
        # Batch norm looks at axis 1, a linear layer puts its outputs on the last.
        on_axis_1 = not isinstance(layer, nn.Linear) or len(tensor_shape(source) or ()) == 2
        are_plain = has_plain_forward(norm) and has_plain_forward(layer)
        if is_fixed and on_axis_1 and are_plain and type(layer) in DENSE_AND_GROUPED_TYPES:
            fold_into_layer_(layer, cast(nn.BatchNorm2d, norm))
            node.replace_all_uses_with(source)
            graph_module.graph.erase_node(node)


def wide_enough_groups(num_groups: int, narrower_side: int, widen_groups_below: int) -> int:
    """The largest divisor of the number of groups that makes them wide enough; one if none does."""
    fitting = (groups for groups in range(num_groups, 1, -1) if num_groups % groups == 0)
    return next((groups for groups in fitting if narrower_side // groups >= widen_groups_below), 1)


def merge_groups_(layer: nn.Module, merged_groups: int) -> None:
    """Let a layer run with fewer groups, in place. A shuffled layer that is left with one group becomes dense."""
    weight, groups = layer.get_parameter("weight").data, groups_of_weight(layer)
    if is_grouped(layer):
        orders = channel_orders(layer)
        merged = merged_weight(weight[torch.argsort(orders["out_inverse"])], groups, merged_groups)
        merged = merged[orders["out_inverse"]]
        if merged_groups == 1:
            merged = merged[:, torch.argsort(orders["in_perm"])]
    else:
        merged = merged_weight(weight, groups, merged_groups)
    # A new parameter: another layer may hold the old one.
    layer.weight = nn.Parameter(like_memory_format(merged, weight), requires_grad=False)
    cast(nn.Conv2d, layer).groups = merged_groups
    if merged_groups == 1 and is_grouped(layer):
        del layer.in_perm, layer.out_inverse
        forms = forms_of(layer)
        assert forms is not None
        layer.__class__ = forms.dense
        if isinstance(layer, nn.Linear):
            del layer.groups


def widen_groups_(model: nn.Module, names: Iterable[str], *, widen_groups_below: int) -> tuple[WidenedLayer, ...]:
    """Widen the narrow groups of the named modules, in place; returns the layers that changed.

    Depthwise convolutions stay: runtimes have fast kernels for them. So do layers with hooks that may read the weight.
    """
    widened = []
    for name in dict.fromkeys(names):
        layer = model.get_submodule(name)
        if type(layer) not in DENSE_AND_GROUPED_TYPES or not has_plain_forward(layer):
            continue
        weight, groups = layer.get_parameter("weight"), groups_of_weight(layer)
        is_depthwise = not is_grouped(layer) and weight.shape[1] == 1
        merged_groups = wide_enough_groups(groups, min(channels(layer)), widen_groups_below)
        if is_plain(weight) and not is_depthwise and merged_groups < groups:
            merge_groups_(layer, merged_groups)
            widened.append(WidenedLayer(layer=name, groups=BeforeAfter(groups, merged_groups)))
    return tuple(widened)
