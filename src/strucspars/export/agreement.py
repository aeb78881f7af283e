"""Whether a runtime computes what the network computes: random inputs, two batch sizes, every output."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from strucspars.convert.comparison import Comparison, compare_outputs, tolerance
from strucspars.cost.counting import undisturbed
from strucspars.export.example_batch import Arguments, ExampleBatch
from strucspars.export.quiet import first_line


def output_tensors(outputs: object) -> list[torch.Tensor]:
    """The tensors of a tensor, or of lists, tuples and dictionaries of them, in order.

    Raises:
        ValueError: something else is among them, which no file can put out.
    """
    if isinstance(outputs, torch.Tensor):
        return [outputs.detach()]
    if isinstance(outputs, Mapping):
        return [tensor for part in outputs.values() for tensor in output_tensors(part)]
    if isinstance(outputs, list | tuple):
        return [tensor for part in outputs for tensor in output_tensors(part)]
    raise ValueError(
        f"the network puts out a {type(outputs).__name__}; a file puts out tensors only, or lists, tuples and "
        "dictionaries of them: wrap the network in a module that returns those"
    )


def with_plain_containers(outputs: object) -> object:
    """The same outputs in lists, tuples and dictionaries, whatever classes of these a network has.

    >>> from collections import namedtuple
    >>> with_plain_containers({"boxes": namedtuple("Boxes", "corners scores")(1, [2])})
    {'boxes': (1, [2])}
    """
    if isinstance(outputs, Mapping):
        return {key: with_plain_containers(part) for key, part in outputs.items()}
    if isinstance(outputs, list | tuple):
        parts = [with_plain_containers(part) for part in outputs]
        return parts if isinstance(outputs, list) else tuple(parts)
    return outputs


def chosen_input_names(model: nn.Module, num_inputs: int, given: Sequence[str] | None) -> tuple[str, ...]:
    """The names that were given, or those of the arguments of `forward`."""
    if given is not None:
        return _checked("input_names", given, num_inputs)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    numbered = [f"input_{place}" for place in range(1, num_inputs + 1)]
    return tuple(names[:num_inputs] if len(names) >= num_inputs else numbered)


def chosen_output_names(outputs: object, given: Sequence[str] | None, *, input_names: Sequence[str]) -> tuple[str, ...]:
    """The names that were given, or the keys of a dictionary, or "output", "output_1" and so on.

    >>> one = torch.zeros(1)
    >>> chosen_output_names({"boxes": [one, one], "mask": one}, None, input_names=["images"])
    ('boxes_0', 'boxes_1', 'mask')
    """
    num_outputs = len(output_tensors(outputs))
    if not num_outputs:
        raise ValueError("the network puts out no tensor; there is nothing to export")
    if given is not None:
        names = _checked("output_names", given, num_outputs)
        both = sorted(set(names) & set(input_names))
        if both:
            raise ValueError(f"{both[0]!r} names an input and an output; give them different names")
        return names
    if isinstance(outputs, Mapping) and all(map(str, outputs)):
        keys = tuple(name for key, part in outputs.items() for name in _names_below(str(key), part))
        if len(set(keys) - set(input_names)) == num_outputs:
            return keys
    stem = "output"
    while any(name == stem or name.startswith(f"{stem}_") for name in input_names):
        stem = f"network_{stem}"
    return (stem, *(f"{stem}_{place}" for place in range(1, num_outputs)))


def _names_below(key: str, part: object) -> list[str]:
    """Names of the tensors of one entry: its key, followed by the keys and places on the way to each tensor."""
    if isinstance(part, torch.Tensor):
        return [key]
    assert isinstance(part, Mapping | list | tuple), "output_tensors has seen to it"
    entries = part.items() if isinstance(part, Mapping) else enumerate(part)
    return [name for below, entry in entries for name in _names_below(f"{key}_{below}", entry)]


def _checked(argument: str, names: Sequence[str], wanted: int) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{argument} must be a list of texts that are not empty, got {names!r}")
    if len(names) != wanted:
        raise ValueError(f"{argument} has {len(names)} names, the network has {wanted}: {list(names)}")
    if len(set(names)) < wanted:
        raise ValueError(f"{argument} has a name twice: {list(names)}")
    return tuple(names)


Run = Callable[[Arguments], Sequence[torch.Tensor]]


class ExportMismatch(ValueError):
    """A runtime puts out something else than the network."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How closely a runtime agrees with the network.

    Attributes:
        batch_sizes: that were tried.
        max_relative_error: largest difference over the largest output, of all outputs and batch sizes.
        tolerance: what was allowed.
        num_outputs: tensors that the network puts out.
        num_winners: rows of outputs `(batch, classes)` whose largest entry was compared: all that are not too close to
            call.
    """

    batch_sizes: tuple[int, ...]
    max_relative_error: float
    tolerance: float
    num_outputs: int
    num_winners: int


def checked_agreement(model: nn.Module, run: Run, batch: ExampleBatch, *, runtime: str, path: Path) -> Agreement:
    """Compare a runtime with the network on random inputs like the example, at each batch size.

    Args:
        model: what the runtime should compute, on the CPU; it is called in eval mode, and stays as it is.
        run: the runtime, from inputs to all outputs in order.
        batch: the example inputs.
        runtime: its name, for the message.
        path: of the file that it runs, for the message.

    Raises:
        ExportMismatch: something differs; the message says what.
    """
    errors, tolerances, num_winners, num_outputs = [0.0], [0.0], 0, 0
    for size in batch.sizes:
        inputs = batch.random_like(size)
        with undisturbed(model):
            expected = output_tensors(model(*(tensor.clone() for tensor in inputs)))
        outputs = _outputs(run, inputs, f"{runtime} cannot run the network at batch size {size}", path)
        # Some runtimes compute double precision in single.
        expected = [right.float() if right.dtype == torch.float64 else right for right in expected]
        compared = compare_outputs(list(outputs), expected)
        complaint = _complaint(compared, outputs, expected)
        if complaint:
            raise ExportMismatch(
                f"{runtime} computes something else than the network at batch size {size}: {complaint}; {path} is not "
                "written. Networks that draw random numbers in eval mode, or keep something from call to call, cannot "
                "be compared; otherwise try another format or version of the runtime, and compare "
                "fold(model, example_inputs) with the network"
            )
        errors.append(compared.relative_error)
        tolerances.append(compared.tolerance)
        num_winners += sum(int(clear_winners(right).sum()) for right in expected)
        num_outputs = len(expected)
    return Agreement(
        batch_sizes=batch.sizes,
        max_relative_error=max(errors),
        tolerance=max(tolerances),
        num_outputs=num_outputs,
        num_winners=num_winners,
    )


def _outputs(run: Run, inputs: Arguments, failure: str, path: Path) -> Sequence[torch.Tensor]:
    try:
        return run(inputs)
    # Every runtime has errors of its own.
    except Exception as error:
        raise ExportMismatch(
            f"{failure}: {first_line(error)}; {path} is not written. Where the network's code fixes the batch size, "
            "pass dynamic_batch=False; export a network in half precision as model.float()"
        ) from error


def _complaint(compared: Comparison, outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """How outputs differ from the expected ones; empty if they agree."""
    if compared.complaint:
        return compared.complaint
    for place, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        clear = clear_winners(right)
        if clear.any() and not torch.equal(output[clear].argmax(1), right[clear].argmax(1)):
            return f"another class wins in output {place}"
    if not any(right.isfinite().any() for right in expected):
        return "nothing can be compared, as the network puts out no finite number for inputs like the example"
    return ""


def clear_winners(expected: torch.Tensor) -> torch.Tensor:
    """Which rows of an output `(batch, classes)` have a largest entry that rounding cannot dethrone."""
    is_scores = expected.dim() == 2 and expected.shape[1] > 1 and expected.is_floating_point()
    if not is_scores or not len(expected) or not expected.isfinite().all():
        return torch.zeros(expected.shape[:1], dtype=torch.bool, device=expected.device)
    values = expected.double()
    first, second = values.topk(2, dim=1).values.unbind(1)
    margin = tolerance(expected) * values.abs().amax()
    return first - second > margin
