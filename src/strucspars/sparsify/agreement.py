"""One decision for all processes: rank 0 decides, the others take it over, and all check a hash of it."""

import hashlib
import pickle
from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

Decision = TypeVar("Decision")


def agreed(decide: Callable[[], Decision]) -> Decision:
    """What `decide` returns on rank 0, on every rank; only rank 0 calls it. A single process does the same.

    Raises:
        ValueError: rank 0's decision failed so; all ranks raise it, instead of waiting forever.
        RuntimeError: rank 0 failed otherwise, or some rank holds another decision after the broadcast.
    """
    distributed = dist.is_available() and dist.is_initialized()
    parcel: list[bytes] = [b""]
    failure: Exception | None = None
    if not distributed or dist.get_rank() == 0:
        try:
            parcel = [pickle.dumps((decide(), None, None))]
        except Exception as error:
            # Whatever it was: the others wait for an answer.
            failure = error
            parcel = [pickle.dumps((None, isinstance(error, ValueError), f"{type(error).__name__}: {error}"))]
    if distributed:
        dist.broadcast_object_list(parcel, src=0)
        _check_same(hashlib.sha256(parcel[0]).hexdigest())
    if failure is not None:
        raise failure
    # These bytes were packed by a process of this very run.
    decision, refused, message = pickle.loads(parcel[0])
    if message is not None:
        raise (ValueError if refused else RuntimeError)(f"rank 0 could not decide: {message}")
    return cast(Decision, decision)


def _check_same(fingerprint: str) -> None:
    fingerprints = [""] * dist.get_world_size()
    dist.all_gather_object(fingerprints, fingerprint)
    others = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
    if others:
        raise RuntimeError(f"ranks {others} hold another grouping decision than rank 0; check the process group")
