"""What every process has for itself in the middle of an epoch, as checkpoints hold it: random states and sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strucspars.training.engine import Engine
from strucspars.training.steps import CAPTURE_LOCK


@dataclass(frozen=True, eq=False)
class ProcessStates:
    """Of all processes, in their order.

    Attributes:
        random_states: of each process: the CPU's, and the device's.
        sums: float64 `(processes, 2)`: losses and right answers of the epoch so far.
    """

    random_states: list[list[torch.Tensor]]
    sums: torch.Tensor


def gathered(engine: Engine, sums: torch.Tensor) -> ProcessStates:
    """What all processes have at this moment; every one of them must ask."""
    own = _random_states(), sums.cpu()
    states: list[Any] = [own]
    if engine.world_size > 1:
        states *= engine.world_size
        torch.distributed.all_gather_object(states, own)
    return ProcessStates([random_states for random_states, _ in states], torch.stack([sums for _, sums in states]))


def own_random_states(saved: Sequence[Sequence[torch.Tensor]], engine: Engine) -> list[torch.Tensor]:
    """Those of this process; none where another number of processes wrote the checkpoint.

    Then a new process has no state to go on from, and one that takes over another's would drop the same neurons.

    Raises:
        RuntimeError, TypeError: they are no random states.
    """
    if len(saved) != engine.world_size:
        return []
    own = list(saved[engine.rank])
    # Tried out on generators of no consequence: here an error can still be put down to the checkpoint.
    torch.Generator().set_state(own[0])
    for state in own[1:] if torch.cuda.is_available() else []:
        torch.Generator("cuda").set_state(state)
    return own


def set_random_states_(states: Sequence[torch.Tensor]) -> None:
    """Let the generators of this process go on from there."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


def own_sums(saved: torch.Tensor, engine: Engine) -> torch.Tensor:
    """Those of this process; an equal share where another number of processes wrote the checkpoint."""
    if len(saved) == engine.world_size:
        return saved[engine.rank]
    # Batches of fewer processes are larger: that changes the number of right answers in one, but no mean loss.
    losses, right = saved.unbind(dim=1)
    return torch.stack([losses.mean(), right.sum() / engine.world_size])


def in_present_form(checkpoint: Mapping[str, Any], engine: Engine) -> Mapping[str, Any]:
    """A checkpoint of version 1 as one of version 2, so that runs begun before an update can be finished.

    Version 1 knew the first process's random state only: that is enough for one process. Its sums were means over the
    processes. Every stage saw the data from their first epoch on, and goes on like that to its end.
    """
    if checkpoint["version"] != 1:
        return checkpoint
    return {
        **checkpoint,
        "data_epochs_before": 0,
        "random_states": [checkpoint["random_states"]],
        "sums": checkpoint["sums"].expand(engine.world_size, -1),
    }


def _random_states() -> list[torch.Tensor]:
    """The CPU's random state, and the device's."""
    with CAPTURE_LOCK:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states
