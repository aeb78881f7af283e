"""Which tiles are the quickest for the layers of ResNet-50 on a GPU: far more than `compile_for_gpu` times.

    python benchmarks/gpu_tiles.py --settings float16:256 float16:1      # minutes on one GPU

For every different layer and seam of the compressed network, all kernels with a grid of tiles: the quickest ones, and
how much slower the quickest is of those that the kernel itself proposes.
"""

import argparse
import copy
import itertools
import json
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from environment import ROOT, describe
from torch import Tensor

from strucspars.bench.networks import PAPER_GROUPS, random_networks
from strucspars.convert.fold import fold
from strucspars.convert.seams import seam_of, seam_sites
from strucspars.export.gpu_plan import FusedGraph, fused_graph, seam_call
from strucspars.kernels.grouped_conv import Tiles, power_of_two, wider_groups
from strucspars.kernels.registry import ConvProblem
from strucspars.kernels.seam import NAME, SeamProblem
from strucspars.kernels.stock import stock_settings
from strucspars.kernels.tuning import Outputs, Problem, graph_timer, timed_implementations

SMALL, SIZE, PIECES = 64, 224, 8
SHOWN = 4


class Widened(Problem):
    """A problem with more implementations than its own."""

    def __init__(self, problem: Problem, others: list[tuple[str, str]]) -> None:
        self._problem, self._others = problem, others

    @property
    def dtype(self) -> torch.dtype:
        """That of the problem."""
        return self._problem.dtype

    @property
    def signature(self) -> str:
        """That of the problem."""
        return self._problem.signature

    def inputs(self) -> tuple[Tensor | None, ...]:
        """Those of the problem."""
        return self._problem.inputs()

    def expected(self, inputs: tuple[Tensor | None, ...]) -> Outputs:
        """That of the problem."""
        return self._problem.expected(inputs)

    def implementations(self) -> Iterator[tuple[str, str]]:
        """Its own and the others."""
        yield from dict.fromkeys([*self._problem.implementations(), *self._others])

    def prepare(self, kernel: str, option: str) -> Callable[..., Outputs]:
        """As the problem does."""
        return self._problem.prepare(kernel, option)


def conv_options(problem: ConvProblem) -> list[tuple[str, str]]:
    """A grid of tiles for every kernel that supports a convolution."""
    conv, call = problem.conv, problem.call
    kernels = {kernel for kernel, _ in problem.implementations()}
    found: list[tuple[str, str]] = []
    small = call.input_shape[0] * call.input_shape[2] * call.input_shape[3] < 2**14
    for groups in wider_groups(conv, 16, 32, 64):
        width = power_of_two(conv.out_channels // groups, 256)
        deep = power_of_two(conv.in_channels // groups, 128)
        if "triton" in kernels:
            for m, n, k, warps, stages in itertools.product(
                (16, 32, 64) if small else (64, 128, 256), (32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4)
            ):
                if n <= max(width, 32) and k <= max(deep, 32) and m * n <= 128 * 128:
                    found.append(("triton", str(Tiles(groups, m, n, k, warps, stages))))
        if "triton rows" in kernels and max(conv.in_channels, conv.out_channels) // groups <= 64:
            rows_tiles = itertools.product((2, 4, 7, 14), (64, 128, 256), (4, 8), (1, 2, 3))
            found += [
                ("triton rows", f"groups {groups}, rows {rows}, columns {m}, warps {warps}, stages {stages}")
                for rows, m, warps, stages in rows_tiles
            ]
    if "triton stem" in kernels:
        stem_tiles = itertools.product((2, 4, 8, 14, 28), (64, 128), (32, 64), (4, 8), (1, 2, 3))
        found += [
            ("triton stem", f"strip {strip}, tile {m}x{n}, warps {warps}, stages {stages}")
            for strip, m, n, warps, stages in stem_tiles
        ]
    return found


def seam_options(problem: SeamProblem) -> list[tuple[str, str]]:
    """A grid of tiles for a seam."""
    width = problem.seam.common_width
    tiles = itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3))
    return [
        (NAME, f"tile {m}, chunk {chunk}, warps {warps}, stages {stages}")
        for m, chunk, warps, stages in tiles
        if width % chunk == 0
    ]


def problems_of(fused: FusedGraph) -> Iterator[tuple[str, Problem, list[tuple[str, str]]]]:
    """The different problems of a network, each with the name of a layer and a grid of options."""
    seen: set[str] = set()
    for site in seam_sites(fused.steps):
        for part in site.parts():
            seam = SeamProblem(seam_of(part, fused.steps), seam_call(part, fused))
            if seam.signature not in seen and list(seam.implementations()):
                seen.add(seam.signature)
                yield f"seam {fused.steps[site.first].name}", seam, seam_options(seam)
    for step, call in fused.calls.items():
        problem = ConvProblem(step.conv, call)
        if problem.signature not in seen:
            seen.add(problem.signature)
            yield step.name, problem, conv_options(problem)


def sampled(options: list[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """So many options at random."""
    return random.Random(0).sample(options, min(most, len(options)))


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["float16:256"], help="precision:batch")
    parser.add_argument("--rate", type=float, default=0.85, choices=sorted(PAPER_GROUPS["resnet50"]))
    parser.add_argument("--most", type=int, default=60, help="options of a problem, drawn at random from the grid")
    parser.add_argument("--only", default="", help="problems whose name or signature has this text")
    parser.add_argument("--seconds", type=float, default=600.0, help="no problem begins later")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu_tiles.json", help="where the JSON goes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    begin = time.perf_counter()
    network = random_networks(
        "resnet50", [options.rate], image_shape=(3, SMALL, SMALL), orders=("one-shuffle",), pieces=PIECES
    )[1]
    with stock_settings():
        folded = fold(network.model.cuda().eval(), torch.randn(2, 3, SMALL, SMALL, device="cuda"))
    report = {"environment": describe(("strucspars", "torch", "triton")), "rate": options.rate, "problems": {}}
    for setting in options.settings:
        name, batch = setting.split(":")
        x = torch.randn(int(batch), 3, SIZE, SIZE, device="cuda", dtype=getattr(torch, name))
        fused = fused_graph(copy.deepcopy(folded).to(x.dtype), (x,), "tf32x3")
        for layer, problem, grid in problems_of(fused):
            if options.only not in f"{layer} {problem.signature}" or time.perf_counter() - begin > options.seconds:
                continue
            own = set(problem.implementations())
            try:
                times = timed_implementations(Widened(problem, sampled(grid, options.most)), graph_timer)
            except Exception:
                print(traceback.format_exc(), flush=True)
                continue
            report["problems"][f"{setting} {problem.signature}"] = [asdict(each) for each in times]
            proposed = next(each for each in times if (each.kernel, each.option) in own)
            print(f"[{time.perf_counter() - begin:6.1f} s] {setting} {layer}: {problem.signature}")
            print(f"    proposed: {1000 * proposed.ms:.1f} us {proposed.kernel} ({proposed.option})")
            for each in times[:SHOWN]:
                print(f"    {1000 * each.ms:.1f} us {each.kernel} ({each.option})", flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
