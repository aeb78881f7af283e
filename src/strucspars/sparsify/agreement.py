"""One decision in distributed training: the first process decides, and all check that they hold the same."""

import hashlib
import pickle
from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

Decision = TypeVar("Decision")


def agreed(decide: Callable[[], Decision]) -> Decision:
    """What `decide` returns on rank 0, on every rank; only rank 0 calls it.

    Raises:
        ValueError: rank 0's decision failed so; all ranks raise it, instead of waiting forever.
        RuntimeError: rank 0 failed otherwise, or the hash of some rank's decision differs.
    """
    if not dist.is_available() or not dist.is_initialized():
        return decide()
    parcel: list[bytes] = [b""]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            parcel = [pickle.dumps((decide(), None))]
        except Exception as error:  # of any kind: the other ranks wait for an answer
            failure = error
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            parcel = [pickle.dumps((None, kind(f"rank 0 could not decide: {type(error).__name__}: {error}")))]
    dist.broadcast_object_list(parcel, src=0)
    fingerprints = [""] * dist.get_world_size()
    dist.all_gather_object(fingerprints, hashlib.sha256(parcel[0]).hexdigest())
    others = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if others:
        raise RuntimeError(f"ranks {others} hold another grouping decision than rank 0; check the process group")
    decision, refusal = pickle.loads(parcel[0])  # from a process of this run
    if refusal is not None:
        raise failure or refusal
    return cast(Decision, decision)
