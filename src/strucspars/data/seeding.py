"""Random generators that depend on named numbers only, so that a stopped run draws the same again."""

from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """What random numbers are for: two uses of one seed must not draw the same numbers."""

    ORDER = 0
    CROPS = 1
    SAMPLE = 2


def mixed_seed(stream: Stream, *values: int) -> int:
    """One 63-bit seed from a purpose and some numbers, the same on every machine.

    >>> mixed_seed(Stream.ORDER, 0, 1) == mixed_seed(Stream.ORDER, 0, 1)
    True
    >>> mixed_seed(Stream.ORDER, 0, 1) == mixed_seed(Stream.CROPS, 0, 1)
    False
    """
    words = [int(stream), len(values)]
    for value in values:
        if not 0 <= value < 2**64:
            raise ValueError(f"a seed, epoch or index must lie in 0 .. 2**64 - 1, got {value}")
        # Always two words: SeedSequence itself takes 2**32 for (0, 1), and ignores zeros at the end.
        words += [value & 0xFFFFFFFF, value >> 32]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator_for(stream: Stream, *values: int) -> torch.Generator:
    """A generator on the CPU, seeded by a purpose and some numbers. The CPU's draws are the same for every device."""
    return torch.Generator().manual_seed(mixed_seed(stream, *values))
