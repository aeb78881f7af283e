"""Networks compiled for a GPU: the kernels in Triton's interpreter, chosen by a timer that the tests make up."""

import hashlib
import warnings
from collections.abc import Callable

import pytest
import torch
from bottleneck_networks import IMAGE, bottleneck_network, grouped_bottleneck_network
from torch import nn

import strucspars as ss
from strucspars.export import gpu
from strucspars.export.gpu import CapturedCall, GpuNetwork, GpuReport, WrongResultError, planned
from strucspars.export.gpu_plan import FusedGraph, PlannedForm, TimesOf, dense_form, fused_graph
from strucspars.kernels.cache import Tuner
from strucspars.kernels.tuning import Problem, Timed

IMAGES = torch.randn(2, *IMAGE, generator=torch.Generator().manual_seed(1))

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these tests interpret the kernels")


def preferring(*wanted: str, seed: int = 0) -> TimesOf:
    """Made-up times of every implementation: the wanted kernels come first, the others in a random order."""

    def timed(problem: Problem) -> list[Timed]:
        def ms(kernel: str, option: str) -> float:
            number = hashlib.sha256(f"{problem.signature} {kernel} {option} {seed}".encode()).digest()[0]
            return 1 + number if kernel in wanted else 1000 + number

        return sorted(Timed(ms(*each), *each) for each in problem.implementations())

    return timed


def timer_for(form: str) -> Callable[[Callable[[], object]], float]:
    """The dense form is timed first."""
    times = iter([1.0, 2.0] if form == "dense" else [2.0, 1.0])
    return lambda run: next(times)


def compiled(model: nn.Module, timed: TimesOf, form: str = "best") -> GpuNetwork:
    folded = ss.fold(model, IMAGES)
    run, report = planned(folded, (IMAGES,), timed, timer_for(form), products="ieee")
    return GpuNetwork(folded, run, report)


def assert_same(network: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(network(IMAGES), model(IMAGES), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("orders", ["free", "one-shuffle"])
@pytest.mark.parametrize("wanted", ["cudnn", "cublas", "triton", "triton rows", "triton stem", "triton seam"])
def test_every_kernel_gives_the_function_of_the_network(wanted: str, orders: str) -> None:
    model = grouped_bottleneck_network(orders, pieces=4)
    network = compiled(model, preferring(wanted))
    used = {each.kernel for each in network.report.layers}
    # A seam has no gathers on wide channels, which free orders leave.
    assert wanted in used or (wanted, orders) == ("triton seam", "free")
    assert_same(network, model)


@pytest.mark.parametrize("seed", range(3))
def test_random_choices_give_the_function_of_the_network(seed: int) -> None:
    model = grouped_bottleneck_network("one-shuffle", level=3)
    network = compiled(model, preferring(seed=seed))
    assert len({each.kernel for each in network.report.layers}) > 2
    assert_same(network, model)


def test_the_dense_form_is_kept_where_it_is_faster() -> None:
    model = grouped_bottleneck_network("free")
    network = compiled(model, preferring("triton"), form="dense")
    assert network.report.layers == ()
    assert network.report.ms == network.report.dense_ms == 1.0
    assert_same(network, model)


def test_half_precision_is_within_its_tolerance() -> None:
    model = bottleneck_network().half()
    folded = ss.fold(model, IMAGES.half())
    run, _ = planned(folded, (IMAGES.half(),), preferring("triton"), timer_for("best"), products="ieee")
    expected = bottleneck_network()(IMAGES).detach()
    assert ((run((IMAGES.half(),)) - expected).abs().max() / expected.abs().max()).item() < 1e-2


def test_the_plan_is_by_measured_times() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)).eval()
    times = iter(range(1000, 0, -1))
    network = compiled(model, Tuner("a GPU", lambda run: float(next(times))).timed)
    # Each implementation takes less time than the one before it.
    assert [each.kernel for each in network.report.layers] == ["triton", "triton rows"]
    assert_same(network, model)
    assert "every convolution dense" in str(network.report)


def test_other_shapes_run_in_pytorch_and_warn() -> None:
    model = bottleneck_network()
    network = compiled(model, preferring("cudnn"))
    more = torch.cat([IMAGES, IMAGES])
    with pytest.warns(UserWarning, match=r"compiled for .*float32 \(2, 3, 17, 17\).*call compile_for_gpu"):
        found = network(more)
    torch.testing.assert_close(found, model(more).detach(), rtol=1e-3, atol=1e-3)


def test_a_wrong_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "dense_form", _shifted)
    with pytest.raises(WrongResultError, match="differs from its folded graph"):
        compiled(bottleneck_network(), preferring("cudnn"), form="dense")


def _shifted(fused: FusedGraph) -> PlannedForm:
    form = dense_form(fused)
    step = next(iter(fused.calls))
    run = step.run
    step.run = lambda x, residual: 1.1 * run(x, residual)
    return form


def test_outputs_are_not_overwritten_by_the_next_call() -> None:
    fused = fused_graph(ss.fold(bottleneck_network(), IMAGES), (IMAGES,), "ieee")
    run = CapturedCall(dense_form(fused).graph, (IMAGES,))
    first = run((IMAGES,))
    kept = first.clone()
    run((2 * IMAGES,))
    torch.testing.assert_close(first, kept)


def test_without_a_gpu_the_folded_graph_runs_and_a_warning_says_so() -> None:
    model = grouped_bottleneck_network("one-shuffle")
    with pytest.warns(UserWarning, match="falls back to PyTorch: the example inputs are on the CPU"):
        network = ss.compile_for_gpu(model, IMAGES)
    assert str(network.report) == "runs in PyTorch: the example inputs are on the CPU"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(network, model)
        network(torch.cat([IMAGES, IMAGES]))


def test_a_report_without_times_says_why() -> None:
    assert str(GpuReport(fallback_reason="no GPU")) == "runs in PyTorch: no GPU"
