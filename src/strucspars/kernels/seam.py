"""The seam between two residual blocks in one pass: 1x1 convolution + shortcut + ReLU, and the next 1x1 convolution.

The wide tensor between them is written, because the next block adds it, but not read again. Where a block changes the
width, its shortcut is a convolution, and is added in the accumulator of the first.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from strucspars.kernels.fused_conv import FusedConv, Pair, in_precision, piece_table, reference
from strucspars.kernels.grouped_conv import MOST_ENTRIES, MULTIPROCESSORS, SMALLEST_TILE
from strucspars.kernels.kernel import Call, signature
from strucspars.kernels.launch import has_triton, launch
from strucspars.kernels.tuning import Problem, random_tensor

# Narrow channels that a program holds, of every group.
WIDEST_NARROW = 256
NUM_STAGES = 2
# Of a program on Hopper, with some to spare.
SHARED_BYTES = 200 * 1024


class SeamOutputs(NamedTuple):
    """The wide result, and the narrow one where there is a second convolution."""

    wide: Tensor
    narrow: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Seam:
    """`wide = first(narrow)` with `shortcut(other)` as its residual, then `second(wide)`.

    All are 1x1; only the shortcut may have a stride. Without a shortcut, `other` is the residual.
    """

    first: FusedConv
    shortcut: FusedConv | None = None
    second: FusedConv | None = None

    @property
    def common_width(self) -> int:
        """Wide channels that are in one group of every convolution."""
        widths = [self.first.out_width]
        widths += [] if self.shortcut is None else [self.shortcut.out_width]
        widths += [] if self.second is None else [self.second.in_width]
        return math.gcd(*widths)


def seam_reference(seam: Seam, narrow: Tensor, other: Tensor | None) -> SeamOutputs:
    """The same by plain operations of PyTorch."""
    added = other if seam.shortcut is None or other is None else reference(seam.shortcut, other)
    wide = reference(seam.first, narrow, added)
    return SeamOutputs(wide, None if seam.second is None else reference(seam.second, wide))


def seam_in_precision(seam: Seam, dtype: torch.dtype) -> Seam:
    """The same seam in another precision."""

    def converted(conv: FusedConv | None) -> FusedConv | None:
        return None if conv is None else in_precision(conv, dtype)

    return Seam(first=in_precision(seam.first, dtype), shortcut=converted(seam.shortcut), second=converted(seam.second))


@dataclass(frozen=True, kw_only=True)
class SeamCall:
    """What a seam is called with: that of the first convolution, and the size of the shortcut's input."""

    first: Call
    other_size: Pair


@final
class SeamKernel:
    """`seam_kernel` with the tiles that fit a seam."""

    def supports(self, seam: Seam, call: SeamCall) -> bool:
        """Groups of at most `WIDEST_NARROW` narrow channels that divide the wide ones into common chunks."""
        batch, _, height, width = call.first.input_shape
        narrow = [seam.first.in_width] + ([] if seam.second is None else [seam.second.out_width])
        narrow += [] if seam.shortcut is None else [seam.shortcut.in_width]
        entries = batch * seam.first.out_channels * height * width
        other = 0 if seam.shortcut is None else batch * seam.shortcut.in_channels * math.prod(call.other_size)
        return (
            has_triton(call.first.device)
            and call.first.dtype in (torch.float16, torch.bfloat16, torch.float32)
            and _is_plain(seam.first, may_read_pieces=True)
            and (seam.second is None or _is_plain(seam.second))
            and (seam.shortcut is None or _is_shortcut(seam.shortcut))
            and max(narrow) <= WIDEST_NARROW
            and bool(_chunks(seam, call, SMALLEST_TILE))
            and max(entries, other) <= MOST_ENTRIES
        )

    def options(self, seam: Seam, call: SeamCall) -> Sequence[str]:
        """Some tiles of positions and chunks of wide channels."""
        batch, _, height, width = call.first.input_shape
        groups = (seam.second or seam.first).groups
        enough = [m for m in (128, 64, 32, 16) if -(-batch * height * width // m) * groups >= MULTIPROCESSORS]
        return [
            f"tile {block_m}, chunk {chunk}, warps {8 if block_m == 128 else 4}, stages {NUM_STAGES}"
            for block_m in (*enough[:2], SMALLEST_TILE)
            for chunk in _chunks(seam, call, block_m)[:2]
        ][:4]

    def prepare(self, seam: Seam, call: SeamCall, option: str) -> "SeamRun":
        """The seam with these tiles."""
        block_m, chunk, num_warps, num_stages = map(int, re.findall(r"\d+", option))
        return SeamRun(seam, call, block_m=block_m, chunk=chunk, num_warps=num_warps, num_stages=num_stages)


@final
class SeamRun:
    """A seam that is ready to run."""

    def __init__(
        self, seam: Seam, call: SeamCall, *, block_m: int, chunk: int, num_warps: int, num_stages: int
    ) -> None:
        first, shortcut, second = seam.first, seam.shortcut, seam.second
        self._seam = seam
        self._pieces: Tensor | None = None
        piece = 0
        if first.in_order is not None:
            self._pieces, piece = piece_table(first.in_order, first.in_width)
        self._bias = first.bias if shortcut is None else first.bias + shortcut.bias
        self._weights = [
            None if conv is None else conv.weight.flatten(1).contiguous() for conv in (first, shortcut, second)
        ]
        self._groups = (second or first).groups
        self._block_m = block_m
        self._constants = {
            "STRIDE": 1 if shortcut is None else shortcut.stride[0],
            "PIECE": piece,
            "FIRST_IN": first.in_width,
            "FIRST_OUT": first.out_width,
            "FIRST_K": _tile_of(first.in_width),
            "SHORTCUT": "product" if shortcut else "residual" if call.first.has_residual else "none",
            "SHORTCUT_IN": 0 if shortcut is None else shortcut.in_width,
            "SHORTCUT_OUT": 0 if shortcut is None else shortcut.out_width,
            "SHORTCUT_K": 0 if shortcut is None else _tile_of(shortcut.in_width),
            "HAS_SECOND": second is not None,
            "SECOND_IN": first.out_width if second is None else second.in_width,
            "SECOND_OUT": 0 if second is None else second.out_width,
            "FIRST_RELU": first.relu,
            "SECOND_RELU": second is not None and second.relu,
            "PRODUCTS": call.first.float32_products,
            "BLOCK_M": block_m,
            "BLOCK_N": SMALLEST_TILE if second is None else _tile_of(second.out_width),
            "CHUNK": chunk,
            "num_warps": num_warps,
            "num_stages": num_stages,
        }

    def __call__(self, narrow: Tensor, other: Tensor | None) -> SeamOutputs:
        """The wide and the narrow result, channels last."""
        from strucspars.kernels.seam_triton import seam_kernel

        first, second = self._seam.first, self._seam.second
        narrow = narrow.contiguous(memory_format=torch.channels_last)
        other = None if other is None else other.contiguous(memory_format=torch.channels_last)
        batch, channels, height, width = narrow.shape

        def new(out_channels: int) -> Tensor:
            shape = (batch, out_channels, height, width)
            return torch.empty(shape, dtype=narrow.dtype, device=narrow.device, memory_format=torch.channels_last)

        outputs = SeamOutputs(new(first.out_channels), None if second is None else new(second.out_channels))
        num_positions = batch * height * width
        if not num_positions:
            return outputs
        other_channels, other_height, other_width = (0, 0, 0) if other is None else other.shape[1:]
        first_weight, shortcut_weight, second_weight = self._weights
        launch(
            seam_kernel,
            (-(-num_positions // self._block_m) * self._groups,),
            narrow,
            first_weight,
            self._bias,
            other,
            shortcut_weight,
            outputs.wide,
            second_weight,
            None if second is None else second.bias,
            outputs.narrow,
            self._pieces,
            num_positions,
            other_height,
            other_width,
            height,
            width,
            self._groups,
            channels,
            first.out_channels,
            other_channels,
            0 if second is None else second.out_channels,
            **self._constants,
        )
        return outputs


def _is_plain(conv: FusedConv, *, may_read_pieces: bool = False) -> bool:
    has_orders = conv.out_order is not None or (conv.in_order is not None and not may_read_pieces)
    return conv.is_pointwise and conv.pool is None and not has_orders


def _is_shortcut(conv: FusedConv) -> bool:
    has_orders = conv.out_order is not None or conv.in_order is not None
    is_single = conv.kernel_size == (1, 1) and conv.padding == (0, 0) and conv.stride[0] == conv.stride[1]
    return is_single and conv.pool is None and not conv.relu and not has_orders


def _chunks(seam: Seam, call: SeamCall, block_m: int) -> list[int]:
    """Chunks for which a program fits into shared memory: inputs, and the tiles of all weights at every stage."""
    inputs = _tile_of(seam.first.in_width) + (0 if seam.shortcut is None else _tile_of(seam.shortcut.in_width))
    outputs = 0 if seam.second is None else _tile_of(seam.second.out_width)
    # In float32, the tensor cores read each number in two parts.
    entry = call.first.dtype.itemsize * (2 if call.first.dtype == torch.float32 else 1)
    fitting = (chunk for chunk in (128, 64, 32, 16) if seam.common_width % chunk == 0)
    return [c for c in fitting if entry * (block_m * inputs + NUM_STAGES * c * (inputs + outputs)) <= SHARED_BYTES]


def _tile_of(width: int) -> int:
    return max(SMALLEST_TILE, 1 << (width - 1).bit_length())


NAME, KERNEL = "triton seam", SeamKernel()


@final
@dataclass(frozen=True, eq=False)
class SeamProblem(Problem):
    """A seam and how it is called."""

    seam: Seam
    call: SeamCall

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and results."""
        return self.call.first.dtype

    @property
    def signature(self) -> str:
        """Those of its convolutions."""
        parts = [f"seam, other {self.call.other_size[0]}x{self.call.other_size[1]}"]
        convs = (self.seam.first, self.seam.shortcut, self.seam.second)
        parts += ["none" if conv is None else signature(conv, self.call.first) for conv in convs]
        return "; ".join(parts)

    def inputs(self) -> tuple[Tensor | None, ...]:
        """Narrow channels, and those of the shortcut."""
        call, seam = self.call.first, self.seam
        channels = seam.first.out_channels if seam.shortcut is None else seam.shortcut.in_channels
        other_shape = (call.input_shape[0], channels, *self.call.other_size)
        other = random_tensor(other_shape, call, seed=1) if call.has_residual else None
        return random_tensor(call.input_shape, call, seed=0), other

    def expected(self, inputs: tuple[Tensor | None, ...]) -> SeamOutputs:
        """By PyTorch's operations."""
        narrow, other = inputs
        assert narrow is not None
        seam = seam_in_precision(self.seam, torch.float32)
        return seam_reference(seam, narrow.float(), None if other is None else other.float())

    def implementations(self) -> Iterator[tuple[str, str]]:
        """The kernel's options."""
        if KERNEL.supports(self.seam, self.call):
            yield from ((NAME, option) for option in KERNEL.options(self.seam, self.call))

    def prepare(self, kernel: str, option: str) -> Callable[..., SeamOutputs]:
        """The seam, ready to run."""
        return KERNEL.prepare(self.seam, self.call, option)
