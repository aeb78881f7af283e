"""How fast ResNet-50 runs on a GPU: dense and compressed, layer by layer and whole.

    python benchmarks/gpu_inference.py                       # everything, some minutes on one GPU
    python benchmarks/gpu_inference.py --seconds 150 --settings float16:256 float32:64

Forms of the network, with random weights and orders, never zeros:

- `eager`: the dense network as it is, channels last, cuDNN's algorithms chosen by timing.
- `stock`: batch norms folded, cuDNN's fused convolution + bias + ReLU (+ addition), one CUDA graph.
- `dense`: the dense network as `compile_for_gpu` runs it.
- `85 % one-shuffle` and others: the compressed network as `compile_for_gpu` runs it, orders in pieces of 8 channels.

All but `eager` are CUDA graphs, replayed in turn; medians with quartiles. float32 is without TF32, ours as sums of
three TF32 numbers. A layer's floor is what it must read and write, at the speed at which this GPU copies memory. What
is measured is written as it comes.
"""

import argparse
import copy
import json
import math
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import ROOT, describe
from torch import Tensor, fx, nn

from strucspars.bench.networks import PAPER_GROUPS, random_networks
from strucspars.convert.fold import fold
from strucspars.convert.fusion import ConvStep
from strucspars.export.gpu import CapturedCall, planned
from strucspars.export.gpu_plan import DENSE, dense_form, fused_graph
from strucspars.kernels.cache import Tuner
from strucspars.kernels.fused_conv import FusedConv
from strucspars.kernels.kernel import Call, signature
from strucspars.kernels.registry import ConvProblem
from strucspars.kernels.stock import stock_settings
from strucspars.kernels.tuning import Timed, graph_timer

# Folding looks at small images: the graph is the same for all sizes.
SMALL = 64
SIZE = 224
PIECES = 8
POLICIES = ("one-shuffle", "shared", "free")
RATES = (0.85, 0.65)
SETTINGS = ("float16:256", "float32:64", "float16:64", "float16:1", "float32:256", "float32:1", "bfloat16:256")
ROUNDS = 30
WARM_SECONDS = 1.0


@dataclass(frozen=True)
class Form:
    """A network to time, folded, by its name in the tables."""

    name: str
    folded: fx.GraphModule


def forms_of(rates: list[float], policies: list[str]) -> tuple[nn.Module, list[Form]]:
    """The dense network, and the forms that are planned, on the GPU in float32."""
    found, eager = [], None
    for policy in policies:
        networks = random_networks(
            "resnet50", rates, image_shape=(3, SMALL, SMALL), orders=(policy,), pieces=1 if policy == "free" else PIECES
        )
        for network in networks:
            if network.form == "bound" or (network.rate is None and eager is not None):
                continue
            model = network.model.cuda().eval()
            eager = model if network.rate is None else eager
            name = "dense" if network.rate is None else f"{100 * network.rate:.0f} % {policy}"
            with stock_settings():
                found.append(Form(name, fold(model, torch.randn(2, 3, SMALL, SMALL, device="cuda"))))
    assert eager is not None
    return eager, found


class Report:
    """What was measured so far, in a file that is written anew after every part."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._begin, self._seconds = path, time.perf_counter(), seconds
        self.content: dict[str, Any] = {
            "environment": describe(("strucspars", "torch", "triton")) | {"gpu": torch.cuda.get_device_name()},
            "settings": {"pieces": PIECES, "size": SIZE, "rounds": ROUNDS},
            "networks": {},
            "layers": {},
            "choices": {},
            "errors": [],
        }

    def say(self, text: str) -> None:
        """Print a line with the seconds so far."""
        print(f"[{time.perf_counter() - self._begin:6.1f} s] {text}", flush=True)

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() - self._begin > self._seconds

    def part(self, name: str, measure: Callable[[], None]) -> None:
        """Do a part, unless the time is up; one that fails does not end the others."""
        if self.is_over():
            self.say(f"{name}: left out, the time is up")
            return
        try:
            measure()
        except Exception:
            self.content["errors"].append({"part": name, "error": traceback.format_exc()})
            print(traceback.format_exc(), flush=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.content, indent=1) + "\n")


def bytes_per_second() -> float:
    """Bytes read and written by a copy of a gigabyte, per second."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    warm_up([lambda: target.copy_(source)])
    ms = graph_timer(lambda: target.copy_(source))
    return 2 * source.nbytes / (ms / 1000)


def floor_ms(conv: FusedConv, call: Call, speed: float) -> float:
    """Milliseconds for reading input, weight and residual, and writing the result."""
    batch, channels, height, width = call.input_shape
    out_height, out_width = conv.out_size(height, width)
    entries = (
        batch * channels * height * width // (conv.stride[0] * conv.stride[1] if conv.kernel_size == (1, 1) else 1)
    )
    entries += batch * conv.out_channels * out_height * out_width * (1 + call.has_residual) + conv.weight.numel()
    return 1000 * entries * call.dtype.itemsize / speed


def measure_setting(
    report: Report, eager: nn.Module, forms: list[Form], tuner: Tuner, setting: str, speed: float
) -> None:
    """All forms in one precision and batch."""
    name, batch = setting.split(":")
    dtype = getattr(torch, name)
    x = torch.randn(int(batch), 3, SIZE, SIZE, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    runs: dict[str, Callable[[], object]] = {}
    with torch.no_grad(), stock_settings():
        model = copy.deepcopy(eager).to(dtype).to(memory_format=torch.channels_last)
        runs["eager"] = lambda: model(x)
        for form in forms:
            folded = copy.deepcopy(form.folded).to(dtype)
            if form.name == "dense":
                runs["stock"] = stock(folded, x).replay
            try:
                captured, chosen = planned(folded, (x,), tuner.timed, graph_timer, products="tf32x3")
                runs[form.name] = captured.replay
                layers = sum(each.ms for each in chosen.layers)
                summary = f"{chosen.ms:.4f} ms, sum of layers {layers:.4f}, all dense {chosen.dense_ms:.4f}"
                report.say(f"{setting} {form.name}: {summary}")
                report.content["choices"][f"{setting} {form.name}"] = [asdict(each) for each in chosen.layers]
                for layer in chosen.layers:
                    print(f"{layer.layer:60} {1000 * layer.ms:8.1f} {layer.kernel} ({layer.option})")
            except Exception:
                report.content["errors"].append({"part": f"{setting} {form.name}", "error": traceback.format_exc()})
                print(traceback.format_exc(), flush=True)
            layer_table(report, f"{setting} {form.name}", folded, x, tuner, speed)
            if report.is_over():
                break
        times = interleaved(runs)
    report.content["networks"][setting] = times
    base = times["stock"]["median_ms"]
    for each, row in times.items():
        report.say(
            f"{setting} {each}: {row['median_ms']:.4f} ms ({row['low_ms']:.4f} to {row['high_ms']:.4f}), "
            f"{base / row['median_ms']:.3f} x stock"
        )


def stock(folded: fx.GraphModule, x: Tensor) -> CapturedCall:
    """The dense network by cuDNN's fused convolutions alone, as one CUDA graph."""
    return CapturedCall(dense_form(fused_graph(folded, (x,), "ieee")).graph, (x,))


def interleaved(runs: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Milliseconds of every form, timed in turn after the clocks are warm."""
    warm_up(list(runs.values()))
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(event_ms(run))
    return {
        name: {
            "median_ms": statistics.median(each),
            "low_ms": each[len(each) // 4],
            "high_ms": each[3 * len(each) // 4],
        }
        for name, each in ((name, sorted(each)) for name, each in times.items())
    }


def warm_up(runs: list[Callable[[], object]]) -> None:
    """Keep the GPU busy until its clocks are up."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_SECONDS:
        for run in runs:
            run()
        torch.cuda.synchronize()


def event_ms(run: Callable[[], object]) -> float:
    """Milliseconds between two events around a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # untyped in torch
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


@dataclass(frozen=True)
class LayerRow:
    """Convolutions that are alike: the name of the first, and the times of all implementations, the quickest first."""

    layer: str
    count: int
    shape: str
    floor_ms: float
    times: tuple[Timed, ...]

    @property
    def dense_ms(self) -> float:
        """As cuDNN computes it with one group; NaN where it does not."""
        return next((each.ms for each in self.times if (each.kernel, each.option) == DENSE), math.nan)

    def __str__(self) -> str:
        us = (1000 * ms for ms in (self.dense_ms, self.floor_ms, self.times[0].ms))
        kinds: dict[str, str] = {}
        for each in self.times:
            tiles = f" [{each.option}]" if each.kernel == "triton" else ""
            kind = each.kernel if tiles else f"{each.kernel} {each.option}"
            kinds.setdefault(kind, f"{kind} {1000 * each.ms:.1f}{tiles}")
        columns = "".join(f"{each:8.1f}" for each in us)
        return f"{self.count}x {self.layer:20} {self.shape:44} {columns} | {'; '.join(kinds.values())}"


def layer_table(report: Report, title: str, folded: fx.GraphModule, x: Tensor, tuner: Tuner, speed: float) -> None:
    """Every different convolution: the quickest of each kernel, beside its floor; from the times of the planner."""
    calls = fused_graph(folded, (x,), "tf32x3").calls
    alike: dict[str, list[ConvStep]] = defaultdict(list)
    for step, call in calls.items():
        alike[signature(step.conv, call)].append(step)
    rows = []
    for first, *others in alike.values():
        conv, call = first.conv, calls[first]
        times, shape = tuner.timed(ConvProblem(conv, call)), describe_layer(conv, call)
        rows.append(LayerRow(first.name, 1 + len(others), shape, floor_ms(conv, call, speed), times))
    report.content["layers"][title] = [asdict(row) | {"dense_ms": row.dense_ms} for row in rows]
    print(f"--- {title}: us of dense cuDNN, floor, quickest; then the quickest of every kernel")
    for row in sorted(rows, key=lambda row: row.count * (row.floor_ms - row.times[0].ms)):
        print(row)
    dense = sum(row.count * row.dense_ms for row in rows)
    floor = sum(row.count * row.floor_ms for row in rows)
    quickest = sum(row.count * row.times[0].ms for row in rows)
    print(f"sums in ms: dense cuDNN {dense:.4f}, floor {floor:.4f}, quickest {quickest:.4f}", flush=True)


def describe_layer(conv: FusedConv, call: Call) -> str:
    """A short text."""
    orders = ("i" if conv.in_order is not None else "") + ("o" if conv.out_order is not None else "")
    kind = f"{conv.kernel_size[0]}x{conv.kernel_size[1]}/{conv.stride[0]} G{conv.groups}"
    extras = f"{' +res' if call.has_residual else ''}{' relu' if conv.relu else ''}{f' {orders}' if orders else ''}"
    return f"{conv.in_channels}->{conv.out_channels} @{call.input_shape[2]} {kind}{extras}"


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), help="precision:batch")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), choices=sorted(PAPER_GROUPS["resnet50"]))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seconds", type=float, default=600.0, help="no part begins later")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu_inference.json", help="where the JSON goes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    torch.manual_seed(0)
    report = Report(options.out, options.seconds)
    speed = bytes_per_second()
    report.content["settings"]["bytes_per_second"] = speed
    report.say(f"{torch.cuda.get_device_name()}: copies {speed / 1e12:.2f} TB/s")
    eager, forms = forms_of(options.rates, options.policies)
    report.say(f"folded: {', '.join(form.name for form in forms)}")
    tuner = Tuner(torch.cuda.get_device_name(), graph_timer)
    for setting in options.settings:
        report.part(setting, partial(measure_setting, report, eager, forms, tuner, setting, speed))
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
