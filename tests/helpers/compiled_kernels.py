"""Compile kernels for a GPU of compute capability 9.0 where there is none, with the arguments they would run with.

    python tests/helpers/compiled_kernels.py

Triton's interpreter, in which the other tests run, accepts what its compiler rejects. Prints a line of JSON for every
kernel and configuration: what was compiled, how often its assembly has each kind of memory access, or the error.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from fused_convs import random_conv

from strucspars.kernels.fused_conv import FusedConv, MaxPool
from strucspars.kernels.grouped_conv import GroupedConv
from strucspars.kernels.kernel import Call, Kernel, signature
from strucspars.kernels.launch import only_compiled
from strucspars.kernels.pooled_stem import PooledStem
from strucspars.kernels.row_conv import RowConv
from strucspars.kernels.seam import KERNEL, Seam, SeamCall, SeamProblem

# Precisions and batches: large tiles, and small ones.
FORMS = ((torch.float16, 64), (torch.float16, 1), (torch.bfloat16, 64), (torch.float32, 64))
# Of channels read and written; none for the natural order.
PIECES = ((16, 8), (8, 0), (0, 0), (1, 1))
SIZE = 14
ACCESSES = {
    "wide copies": r"cp\.async\.c[ag]\.shared\.global .*, 0x10",
    "other copies": r"cp\.async\.c[ag]\.shared\.global .*, 0x[48],",
    "wide loads": r"ld\.global.*\.v4",
    "wide stores": r"st\.global.*\.v4",
    "matrix products": r"wgmma\.mma_async|mma\.sync",
}


class Compiler:
    """In place of Triton's driver: says that there is a GPU; nothing can run."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def order(channels: int, piece: int) -> torch.Tensor | None:
    """A random order in pieces; None for pieces of no width."""
    if not piece:
        return None
    return (torch.randperm(channels // piece)[:, None] * piece + torch.arange(piece)).flatten()


def conv(outs: int, ins: int, size: int, groups: int, dtype: torch.dtype, **others: Any) -> FusedConv:
    weight = torch.zeros(outs, ins // groups, size, size, dtype=dtype)
    padding = (size // 2, size // 2)
    return FusedConv(weight=weight, bias=torch.ones(outs, dtype=dtype), groups=groups, padding=padding, **others)


def call(ins: int, batch: int, dtype: torch.dtype, *, has_residual: bool = False) -> Call:
    products: Any = "tf32x3" if dtype == torch.float32 else "ieee"
    return Call(
        input_shape=(batch, ins, SIZE, SIZE),
        has_residual=has_residual,
        dtype=dtype,
        device=torch.device("cpu"),
        float32_products=products,
    )


def convolutions() -> Iterator[tuple[Kernel, FusedConv, Call]]:
    """Layers of a grouped ResNet-50 in three precisions, with pieces read and written, and odd ones."""
    torch.manual_seed(0)
    for dtype, batch in FORMS:
        is_first = (dtype, batch) == FORMS[0]
        for read, written in PIECES if is_first else PIECES[:1]:
            narrow = conv(64, 256, 1, 4, dtype, relu=True, in_order=order(256, read), out_order=order(64, written))
            yield GroupedConv(), narrow, call(256, batch, dtype)
            wide = conv(256, 64, 1, 4, dtype, in_order=order(64, read), out_order=order(256, written))
            yield GroupedConv(), wide, call(64, batch, dtype, has_residual=True)
        for stride in (1, 2) if is_first else (1,):
            square = conv(128, 128, 3, 4, dtype, in_order=order(128, 8), out_order=order(128, 8))
            square = replace(square, stride=(stride, stride))
            yield GroupedConv(), square, call(128, batch, dtype)
            yield RowConv(), square, call(128, batch, dtype)
        pool = MaxPool((3, 3), (2, 2), (1, 1))
        yield PooledStem(), conv(64, 3, 7, 1, dtype, stride=(2, 2), relu=True, pool=pool), call(3, batch, dtype)
    for seed in range(2):
        yield GroupedConv(), *random_conv(seed)


def seams() -> Iterator[SeamProblem]:
    """All kinds of seams in three precisions."""
    for dtype, batch in FORMS:
        first = conv(256, 64, 1, 2, dtype, relu=True, in_order=order(64, 8))
        second = conv(64, 256, 1, 4, dtype, relu=True)
        shortcut = conv(256, 128, 1, 2, dtype, stride=(2, 2))
        called = call(64, batch, dtype, has_residual=True)
        strided = Seam(first=first, shortcut=shortcut, second=second)
        yield SeamProblem(strided, SeamCall(first=called, other_size=(2 * SIZE, 2 * SIZE)))
        if (dtype, batch) == FORMS[0]:
            strided = replace(strided, second=None)
            yield SeamProblem(strided, SeamCall(first=called, other_size=(2 * SIZE, 2 * SIZE)))
            for each in (called, replace(called, has_residual=False)):
                yield SeamProblem(Seam(first=first, second=second), SeamCall(first=each, other_size=(SIZE, SIZE)))


def accesses(kernels: list[Any]) -> dict[str, Any]:
    """How often the assembly of kernels has each kind of memory access, or the error of the compiler."""
    from triton import FutureKernel

    try:
        found = [kernel.result() if isinstance(kernel, FutureKernel) else kernel for kernel in kernels]
        texts = [kernel.asm["ptx"] for kernel in found]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {name: sum(len(re.findall(pattern, text)) for text in texts) for name, pattern in ACCESSES.items()}


def main() -> None:
    """Compile an option of every kernel in turn, and print what came out."""
    import triton

    triton.runtime.driver.set_active(Compiler())
    for turn, (kernel, each, called) in enumerate(convolutions()):
        options = kernel.options(each, called)
        option = options[turn % len(options)]
        x = torch.empty(called.input_shape, dtype=called.dtype)
        with only_compiled() as kernels:
            kernel.prepare(each, called, option)(x, residual(each, called))
        what = f"{type(kernel).__name__}: {signature(each, called)}; {option}"
        print(json.dumps({"what": what, **accesses(kernels)}), flush=True)
    for turn, problem in enumerate(seams()):
        options = KERNEL.options(problem.seam, problem.call)
        option = options[turn % len(options)]
        with only_compiled() as kernels:
            problem.prepare("", option)(*problem.inputs())
        print(json.dumps({"what": f"{problem.signature}; {option}", **accesses(kernels)}), flush=True)


def residual(each: FusedConv, called: Call) -> torch.Tensor | None:
    """Memory for the residual, if there is one."""
    batch, _, height, width = called.input_shape
    shape = (batch, each.out_channels, *each.conv_size(height, width))
    return torch.empty(shape, dtype=called.dtype) if called.has_residual else None


if __name__ == "__main__":
    main()
