"""What goes into a network and comes out of it, by name and in order."""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import nn


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
