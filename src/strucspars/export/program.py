"""What every export starts from: the folded network as a program of torch.export, and all that its check needs."""

import inspect
import keyword
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from strucspars._version import __version__
from strucspars.convert.comparison import compare_outputs
from strucspars.convert.fold import fold
from strucspars.core.checks import checked_at_least
from strucspars.cost.counting import ExampleInputs, undisturbed
from strucspars.cost.gathers import RemainingGather, gathers_in_folded_pass, is_folded
from strucspars.export.agreement import (
    chosen_input_names,
    chosen_output_names,
    output_tensors,
    with_plain_containers,
)
from strucspars.export.example_batch import SMALLEST_TRACED_BATCH, ExampleBatch, example_batch
from strucspars.export.quiet import first_line, without_chatter
from strucspars.export.storage import hash_of_model
from strucspars.nn.copying import copied
from strucspars.nn.layers import check_plain_weights
from strucspars.nn.names import unwrapped

VERSION_KEY = "strucspars.version"
PLAN_HASH_KEY = "strucspars.plan_sha256"
GATHERS_KEY = "strucspars.num_gathers"
# "true" where a batch may be computed sample by sample.
INDEPENDENT_KEY = "strucspars.samples_are_independent"

# torch.export writes names into Python code.
_NOT_IN_CODE = frozenset('"\\{}\n\r')


@dataclass(frozen=True, kw_only=True)
class InferenceProgram:
    """A network that is ready to be written.

    Attributes:
        reference: the network as it was given, on the CPU: what any file has to agree with.
        exported: its folded form, as torch.export sees it.
        batch: the example inputs.
        input_names: one per input.
        output_names: one per output tensor.
        gathers: the shuffles that folding left.
        metadata: what a file tells about its origin.
    """

    reference: nn.Module
    exported: torch.export.ExportedProgram
    batch: ExampleBatch
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    gathers: tuple[RemainingGather, ...]
    metadata: dict[str, str]


def inference_program(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    dynamic_batch: bool,
    widen_groups_below: int | None = None,
    usual_group_width: int = 1,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> InferenceProgram:
    """Fold a network and let torch.export look at it. The network stays as it is.

    Groups narrower than `usual_group_width` run as wider ones, unless `widen_groups_below` says otherwise.

    Raises:
        ValueError: an argument does not fit, or torch.export cannot take the network in.
    """
    model = unwrapped(model)
    _check_names(model)
    check_plain_weights(model)
    batch = example_batch(example_inputs, dynamic_batch=dynamic_batch)
    chosen_inputs = chosen_input_names(model, len(batch.arguments), input_names)
    reference = copied(model).cpu()
    with undisturbed(reference):
        outputs = reference(*(tensor.clone() for tensor in batch.arguments))
    chosen_outputs = chosen_output_names(outputs, output_names, input_names=chosen_inputs)
    folded = _folded(reference, batch, widen_groups_below, usual_group_width)
    with undisturbed(folded):
        gathers = gathers_in_folded_pass(folded, tuple(tensor.clone() for tensor in batch.arguments))
    metadata = {
        VERSION_KEY: __version__,
        GATHERS_KEY: str(len(gathers)),
        INDEPENDENT_KEY: str(_samples_are_independent(reference, batch)).lower(),
    }
    plan_hash = hash_of_model(model)
    return InferenceProgram(
        reference=reference,
        exported=_exported(folded, batch),
        batch=batch,
        input_names=chosen_inputs,
        output_names=chosen_outputs,
        gathers=gathers,
        metadata=metadata if plan_hash is None else {**metadata, PLAN_HASH_KEY: plan_hash},
    )


def _samples_are_independent(reference: nn.Module, batch: ExampleBatch) -> bool:
    """Whether every sample of a batch gets what it would get alone."""
    if not batch.is_dynamic:
        return False
    inputs = batch.random_like(SMALLEST_TRACED_BATCH)
    parts = [
        tuple(
            tensor[place : place + 1] if batched else tensor
            for tensor, batched in zip(inputs, batch.is_batched, strict=True)
        )
        for place in range(SMALLEST_TRACED_BATCH)
    ]
    try:
        with undisturbed(reference):
            together = output_tensors(reference(*(tensor.clone() for tensor in inputs)))
            alone = [output_tensors(reference(*(tensor.clone() for tensor in part))) for part in parts]
            joined = [torch.cat(outputs) for outputs in zip(*alone, strict=True)]
    # Outputs that are no batch cannot be joined, and some networks need several samples.
    except Exception:
        return False
    return not compare_outputs(together, joined).complaint


def _check_names(model: nn.Module) -> None:
    for name in model.state_dict(keep_vars=True):
        for part in name.split("."):
            if keyword.iskeyword(part) or _NOT_IN_CODE & set(part):
                raise ValueError(
                    f"{name!r} of the network has the name {part!r} in it, which torch.export cannot write: it is a "
                    "keyword of Python, or has quotes, backslashes, braces or line breaks in it; rename it"
                )


def _folded(model: nn.Module, batch: ExampleBatch, widen_groups_below: int | None, usual_width: int) -> fx.GraphModule:
    """The inference graph; a graph that `fold` has made is taken as it is."""
    if not isinstance(model, fx.GraphModule) or not is_folded(model):
        width = usual_width if widen_groups_below is None else widen_groups_below
        return fold(model, batch.arguments, widen_groups_below=width)
    if checked_at_least("widen_groups_below", 1 if widen_groups_below is None else widen_groups_below, 1) > 1:
        raise ValueError(
            f"widen_groups_below={widen_groups_below} comes too late for a graph that is folded already; give "
            "the network itself, or give it to fold"
        )
    return model


def _exported(folded: fx.GraphModule, batch: ExampleBatch) -> torch.export.ExportedProgram:
    _return_plain_containers_(folded)
    arguments = tuple(tensor.clone() for tensor in batch.traceable())
    shapes = _dynamic_shapes(folded, batch)
    try:
        with torch.no_grad(), without_chatter():
            program = torch.export.export(folded, arguments, dynamic_shapes=shapes, strict=False)
    # It runs the network's own code on stand-ins: that can fail in any way at all.
    except Exception as error:
        remedy = "its code must not branch on the values of tensors"
        if batch.is_dynamic:
            remedy += ", and where it fixes the batch size, pass dynamic_batch=False"
        if batch.batch_words:
            remedy += f"; {batch.batch_words}"
        raise ValueError(f"torch.export cannot take the network in: {first_line(error)}; {remedy}") from error
    for node in program.graph.nodes:
        # Names of folders on the machine that exports.
        node.meta.pop("stack_trace", None)
    return program


def _return_plain_containers_(folded: fx.GraphModule) -> None:
    """Named tuples and their like are code of the network, which no file takes along."""
    (output,) = (node for node in folded.graph.nodes if node.op == "output")
    with folded.graph.inserting_before(output):
        output.args = (folded.graph.call_function(with_plain_containers, output.args),)
    folded.recompile()


def _dynamic_shapes(folded: fx.GraphModule, batch: ExampleBatch) -> Any:
    """Which axis of each argument is the batch; all that `*args` takes is one argument, a tuple."""
    samples = torch.export.Dim("batch")
    shapes = [{0: samples} if batched else None for batched in batch.is_batched]
    return tuple(inspect.signature(folded.forward).bind(*shapes).arguments.values())


@contextmanager
def new_tensors_on_cpu() -> Iterator[None]:
    """Let new tensors be made on the CPU meanwhile: by the network's own code, by torch.export, by what reads files.

    >>> with torch.device("meta"), new_tensors_on_cpu():
    ...     torch.zeros(1).device
    device(type='cpu')
    """
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield
