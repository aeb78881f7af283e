"""The common start of all formats: the folded network as a torch.export program, and inputs to check files with.

A format implements `Exporter`, which writes an `InferenceProgram`.
"""

import inspect
import io
import logging
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch
from torch import fx, nn

from strucspars._version import __version__
from strucspars.convert.comparison import compare_outputs, random_like
from strucspars.convert.fold import fold
from strucspars.core.checks import checked_at_least
from strucspars.cost.counting import ExampleInputs, arguments_of, fresh_arguments, undisturbed
from strucspars.cost.gathers import RemainingGather, fold_report, is_folded
from strucspars.export.storage import VERSION_KEY, hash_of_model
from strucspars.nn.layers import check_plain_weights
from strucspars.nn.names import copied, unwrapped

PLAN_HASH_KEY = "strucspars.plan_sha256"
GATHERS_KEY = "strucspars.num_gathers"
# JSON: what images go through before the network.
PREPROCESSING_KEY = "strucspars.preprocessing"
# "int8" in files that were quantised.
PRECISION_KEY = "strucspars.precision"
# "true" if the samples of a batch may be computed one by one.
INDEPENDENT_KEY = "strucspars.samples_are_independent"

# torch.export treats a batch of one as a constant.
SMALLEST_TRACED_BATCH = 2

Arguments = tuple[torch.Tensor, ...]
Inference = Callable[[Arguments], Sequence[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class ExampleBatch:
    """Example inputs on the CPU, which of them have the batch as first axis, and the batch sizes to check."""

    arguments: Arguments
    is_batched: tuple[bool, ...]
    sizes: tuple[int, ...]

    @property
    def is_dynamic(self) -> bool:
        """Whether the batch may have any size."""
        return any(self.is_batched)

    def random_like(self, size: int) -> Arguments:
        """Random inputs of the same kinds, shapes and, roughly, values, with `size` samples; the same every time."""
        generator = torch.Generator().manual_seed(size)
        return tuple(
            random_like(tensor, (size, *tensor.shape[1:]) if batched else tuple(tensor.shape), generator)
            for tensor, batched in zip(self.arguments, self.is_batched, strict=True)
        )


def example_batch(arguments: tuple[Any, ...], *, dynamic_batch: bool) -> ExampleBatch:
    """Check example inputs and find their batch: the first axis of the first, and of all that are as long there."""
    if not arguments:
        raise ValueError("example_inputs is empty; give one tensor per argument of forward")
    for place, value in enumerate(arguments):
        if not isinstance(value, torch.Tensor) or not value.numel():
            given = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"example_inputs[{place}] is {given}, but must be a tensor of at least one sample; wrap the network in "
                "a module that supplies arguments of other types"
            )
    tensors = tuple(value.detach().cpu() for value in arguments)
    size = tensors[0].shape[0] if tensors[0].dim() else 0
    if not dynamic_batch:
        return ExampleBatch(arguments=tensors, is_batched=(False,) * len(tensors), sizes=(max(size, 1),))
    if not size:
        raise ValueError("example_inputs[0] has no axes and therefore no batch; pass dynamic_batch=False")
    is_batched = tuple(tensor.dim() > 0 and tensor.shape[0] == size for tensor in tensors)
    return ExampleBatch(arguments=tensors, is_batched=is_batched, sizes=(size, 3 if size == 1 else 1))


@dataclass(frozen=True, kw_only=True)
class InferenceProgram:
    """A network that is ready to be written; every file has to agree with the `reference`, the network as given."""

    reference: nn.Module
    exported: torch.export.ExportedProgram
    batch: ExampleBatch
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    gathers: tuple[RemainingGather, ...]
    metadata: dict[str, str]


class Exporter(ABC):
    """A file format, with its suffix, and the runtime that checks its files. `register_exporter` gives it a name.

    Convolutions with fewer channels per group than `group_width` run as wider ones, because the runtime is slow with
    narrow groups. `has_names` says whether files keep the names of inputs and outputs.
    """

    suffix: str
    group_width: int = 1
    has_names: bool = True

    @abstractmethod
    def runtime(self) -> str:
        """Name and version of the runtime, or an `ImportError` that says how to install it."""

    @abstractmethod
    def write(self, program: InferenceProgram, path: Path) -> None:
        """Write the file, and others beside it. The path is a temporary one, in a separate folder."""

    @abstractmethod
    def load(self, path: Path) -> Inference:
        """Load a file into the runtime: a function from inputs to all outputs in order."""


@final
class TorchExporter(Exporter):
    """A program that `torch.export.load` reads, for the CPU; it returns plain tuples in place of named ones."""

    suffix = ".pt2"
    has_names = False

    def runtime(self) -> str:
        """The version of torch."""
        return f"torch.export {torch.__version__}"

    def write(self, program: InferenceProgram, path: Path) -> None:
        """Write the file."""
        # In memory first, because torch's own writer does not report a full disk.
        buffer = io.BytesIO()
        try:
            with without_chatter():
                torch.export.save(program.exported, buffer, extra_files=dict(program.metadata))
        # Unsupported parts of a program raise errors of many kinds, without a common base.
        except Exception as error:
            raise ValueError(
                f"torch.export cannot write the network: {first_line(error)}; try another format"
            ) from error
        path.write_bytes(buffer.getvalue())

    def load(self, path: Path) -> Inference:
        """The program of a file."""
        with without_chatter():
            # From memory, because torch warns about some file names.
            program = torch.export.load(io.BytesIO(path.read_bytes())).module()

        def run(arguments: Arguments) -> list[torch.Tensor]:
            with torch.no_grad():
                return output_tensors(program(*(tensor.clone() for tensor in arguments)))

        return run


def optional_module(name: str, *, extra: str) -> Any:
    """A module of an optional dependency, or a `ModuleNotFoundError` that names the extra to install."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing: pip install 'strucspars[{extra}]'", name=name) from error


def inference_program(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    dynamic_batch: bool = True,
    widen_groups_below: int | None = None,
    group_width: int = 1,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> InferenceProgram:
    """Fold a copy of a network and trace it with torch.export, for a format with this `group_width`."""
    model = unwrapped(model)
    check_plain_weights(model)
    batch = example_batch(arguments_of(model, example_inputs), dynamic_batch=dynamic_batch)
    chosen_inputs, reference = choose_input_names(model, len(batch.arguments), input_names), copied(model).cpu()
    with undisturbed(reference):
        outputs = reference(*fresh_arguments(batch.arguments))
    chosen_outputs = choose_output_names(outputs, output_names, input_names=chosen_inputs)
    if isinstance(reference, fx.GraphModule) and is_folded(reference):
        if checked_at_least("widen_groups_below", 1 if widen_groups_below is None else widen_groups_below, 1) > 1:
            raise ValueError(
                f"widen_groups_below={widen_groups_below} comes too late for a graph that is folded already; export "
                "the network itself, or pass widen_groups_below to fold"
            )
        folded = reference
    else:
        width = group_width if widen_groups_below is None else widen_groups_below
        folded = fold(reference, batch.arguments, widen_groups_below=width)
    gathers, plan_hash = fold_report(folded).gathers, hash_of_model(model)
    return InferenceProgram(
        reference=reference,
        exported=_exported(folded, batch),
        batch=batch,
        input_names=chosen_inputs,
        output_names=chosen_outputs,
        gathers=gathers,
        metadata={
            VERSION_KEY: __version__,
            GATHERS_KEY: str(len(gathers)),
            INDEPENDENT_KEY: str(_samples_are_independent(reference, batch)).lower(),
            **({} if plan_hash is None else {PLAN_HASH_KEY: plan_hash}),
        },
    )


def _samples_are_independent(reference: nn.Module, batch: ExampleBatch) -> bool:
    """Whether every sample of a batch gives the same outputs as it does alone."""
    if not batch.is_dynamic:
        return False
    inputs = batch.random_like(SMALLEST_TRACED_BATCH)

    def sample(place: int) -> Arguments:
        pairs = zip(fresh_arguments(inputs), batch.is_batched, strict=True)
        return tuple(tensor[place : place + 1] if batched else tensor for tensor, batched in pairs)

    try:
        with undisturbed(reference):
            together = output_tensors(reference(*fresh_arguments(inputs)))
            alone = [output_tensors(reference(*sample(place))) for place in range(SMALLEST_TRACED_BATCH)]
            joined = [torch.cat(outputs) for outputs in zip(*alone, strict=True)]
    # Outputs without a batch axis cannot be concatenated, and some networks need several samples.
    except Exception:
        return False
    return not compare_outputs(together, joined).complaint


def _exported(folded: fx.GraphModule, batch: ExampleBatch) -> torch.export.ExportedProgram:
    (output,) = (node for node in folded.graph.nodes if node.op == "output")
    with folded.graph.inserting_before(output):
        output.args = (folded.graph.call_function(with_plain_containers, output.args),)
    folded.recompile()
    samples, inputs = torch.export.Dim("batch"), batch.random_like(max(batch.sizes[0], SMALLEST_TRACED_BATCH))
    shapes: list[Any] = [{0: samples} if batched else None for batched in batch.is_batched]
    # The arguments that `*args` takes count as one tuple.
    dynamic_shapes = tuple(inspect.signature(folded.forward).bind(*shapes).arguments.values())
    try:
        with torch.no_grad(), without_chatter():
            program = torch.export.export(folded, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    # torch.export runs the network's code on symbolic values, which can raise any error.
    except Exception as error:
        remedy = "its code must not branch on the values of tensors"
        if batch.is_dynamic:
            remedy += ", and where it fixes the batch size, pass dynamic_batch=False"
        places = [f"example_inputs[{place}]" for place, batched in enumerate(batch.is_batched) if batched]
        if len(places) > 1:
            remedy += (
                f"; {' and '.join(places)} were taken for batches, as the first axis of each has length "
                f"{batch.sizes[0]}: where one of them is none, give an example batch of another size, at least 2"
            )
        raise ValueError(f"torch.export cannot trace the network: {first_line(error)}; {remedy}") from error
    for node in program.graph.nodes:
        # Stack traces name folders of this machine.
        node.meta.pop("stack_trace", None)
    return program


def with_plain_containers(outputs: object) -> object:
    """The outputs in plain lists, tuples and dictionaries: exported files cannot reference the network's classes."""
    if isinstance(outputs, Mapping):
        return {key: with_plain_containers(part) for key, part in outputs.items()}
    if isinstance(outputs, list | tuple):
        parts = [with_plain_containers(part) for part in outputs]
        return parts if isinstance(outputs, list) else tuple(parts)
    return outputs


def output_tensors(outputs: object) -> list[torch.Tensor]:
    """All tensors in an output: a tensor, or lists, tuples and dictionaries of them, in order."""
    return [tensor for _, tensor in _named_tensors(outputs)]


def _named_tensors(outputs: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Each output tensor, named by its keys and positions."""
    if isinstance(outputs, torch.Tensor):
        yield name, outputs.detach()
    elif isinstance(outputs, Mapping | list | tuple):
        for key, part in outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs):
            yield from _named_tensors(part, f"{name}_{key}" if name else str(key))
    else:
        raise ValueError(
            f"the network returns a {type(outputs).__name__}; a file returns tensors only, or lists, tuples and "
            "dictionaries of them: wrap the network in a module that returns those"
        )


def choose_input_names(model: nn.Module, num_inputs: int, given: Sequence[str] | None) -> tuple[str, ...]:
    """The given names, or those of the arguments of `forward`, or "input_1" and so on where `*args` takes some."""
    if given is not None:
        return _checked_names("input_names", given, num_inputs)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in kinds][:num_inputs]
    return tuple(names if len(names) == num_inputs else (f"input_{place}" for place in range(1, num_inputs + 1)))


def choose_output_names(outputs: object, given: Sequence[str] | None, *, input_names: Sequence[str]) -> tuple[str, ...]:
    """The given names, or the keys of a dictionary, or "output", "output_1" and so on."""
    keys = tuple(name for name, _ in _named_tensors(outputs))
    if not keys:
        raise ValueError("the network returns no tensor, so there is nothing to export")
    if given is not None:
        names = _checked_names("output_names", given, len(keys))
        if both := sorted(set(names) & set(input_names)):
            raise ValueError(f"{both[0]!r} names an input and an output; give them different names")
        return names
    if isinstance(outputs, Mapping) and all(keys) and len({*keys, *input_names}) == len(keys) + len(input_names):
        return keys
    stem = "network_output" if any(name.startswith("output") for name in input_names) else "output"
    return (stem, *(f"{stem}_{place}" for place in range(1, len(keys))))


def _checked_names(argument: str, names: Sequence[str], wanted: int) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{argument} must be a list of texts that are not empty, got {names!r}")
    if len(names) != wanted or len(set(names)) < wanted:
        raise ValueError(f"{argument} must be {wanted} different names, got {list(names)}")
    return tuple(names)


@contextmanager
def without_chatter() -> Iterator[None]:
    """Suppress what other libraries print, warn and log; their errors pass."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without colours, for use inside a sentence."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = (line.strip() for line in plain.splitlines())
    return next((line.rstrip(".;: ") for line in lines if line), type(error).__name__)
