"""Check all kernels on this GPU against double precision, on random problems, for some seconds.

    python tests/helpers/check_kernels.py --seconds 60
    compute-sanitizer --tool memcheck python tests/helpers/check_kernels.py --problems 40

Prints what is wrong, and how many results were right.
"""

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
from fused_convs import (
    assert_exact,
    assert_exact_seam,
    call_of,
    pooled_stem,
    random_3x3,
    random_conv,
    random_seam,
)

from strucspars.kernels.grouped_conv import GroupedConv
from strucspars.kernels.pooled_stem import PooledStem
from strucspars.kernels.row_conv import RowConv

LARGEST_IMAGE = 30
MOST_IMAGES = 9
SHOWN = 10


def checks(seed: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """One option of every kernel for random problems."""
    for kernel, draw in ((GroupedConv(), random_conv), (RowConv(), random_3x3)):
        conv, call = draw(seed, most_images=MOST_IMAGES, largest_image=LARGEST_IMAGE)
        if kernel.supports(conv, call):
            options = kernel.options(conv, call)
            option = options[seed % len(options)]
            yield type(kernel).__name__, partial(assert_exact, kernel, conv, call, option, seed=seed)
    seam = random_seam(seed, most_images=MOST_IMAGES, largest_image=LARGEST_IMAGE)
    seam_options = list(seam.implementations())
    if seam_options:
        yield "seam", partial(assert_exact_seam, seam, seam_options[seed % len(seam_options)][1])
    if seed % 4 == 0:
        dtype = (torch.float16, torch.bfloat16, torch.float32)[seed // 4 % 3]
        conv = pooled_stem(1 + seed % 4, 16 * (1 + seed % 5), (3, 5, 7)[seed % 3], 1 + seed % 2, seed % 4, dtype)
        call = call_of(conv, 1 + seed % MOST_IMAGES, 8 + seed % LARGEST_IMAGE, 8 + seed % 17)
        stem = PooledStem()
        options = stem.options(conv, call)
        yield "stem", partial(assert_exact, stem, conv, call, options[seed // 4 % len(options)], seed=seed)


def main() -> None:
    """Check until the time is up or all problems are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--problems", type=int, default=100_000)
    options = parser.parse_args()
    begin, right, wrong = time.perf_counter(), Counter[str](), Counter[str]()
    torch.backends.cudnn.allow_tf32 = False
    seeds = range(options.problems)
    for seed in itertools.takewhile(lambda _: time.perf_counter() - begin < options.seconds, seeds):
        for name, check in checks(seed):
            try:
                check()
                right[name] += 1
            # Compilers and launches raise errors of many kinds.
            except Exception as error:
                wrong[name] += 1
                if sum(wrong.values()) <= SHOWN:
                    print(f"{name}, seed {seed}: {type(error).__name__}: {str(error)[:600]}", flush=True)
    print(f"right: {dict(right)}, wrong: {dict(wrong)}")


if __name__ == "__main__":
    main()
