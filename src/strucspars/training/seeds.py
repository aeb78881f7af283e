"""Seeds that depend on what they are for, so that any epoch of any stage can be repeated on its own."""

import zlib

import numpy as np


def derived_seed(seed: int, purpose: str, number: int = 0) -> int:
    """A seed for one purpose of a run, such as the dropout of its epoch 7; different purposes are independent.

    >>> derived_seed(0, "weights") == derived_seed(0, "weights") != derived_seed(1, "weights")
    True
    """
    words = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), number]).generate_state(2)
    return int(words[0]) << 31 | int(words[1]) >> 1
