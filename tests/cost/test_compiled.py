"""Networks that torch.compile has changed, whole or in part: what is compiled calls no hooks that come later."""

import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.cost.counting import uncompiled
from strucspars.cost.gathers import shuffles_in_pass

IMAGE = torch.zeros(1, 3, 8, 8)


class Chain(nn.Sequential):
    """With a forward of its own: PyTorch 2.11 passes over that of `nn.Sequential` when it compiles in place."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for module in self:
            input = module(input)
        return input


class CompiledForward(nn.Sequential):
    """A block whose class has its forward compiled."""

    @torch.compile(backend="eager")
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for module in self:
            input = module(input)
        return input


def network(block: type[nn.Sequential] = Chain) -> nn.Sequential:
    return Chain(nn.Conv2d(3, 8, 3), block(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3)))


def wrapped() -> nn.Module:
    return cast(nn.Module, torch.compile(network(), backend="eager"))


def compiled_in_place() -> nn.Module:
    model = network()
    model.compile(backend="eager")
    return model


def with_a_block_compiled_in_place() -> nn.Module:
    model = network()
    model[1].compile(backend="eager")
    return model


def with_a_wrapped_block() -> nn.Module:
    model = network()
    model[1] = cast(nn.Module, torch.compile(model[1], backend="eager"))
    return model


def with_a_compiled_forward() -> nn.Module:
    model = network()
    # What the type checker forbids is what people do.
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]  # what users do
    return model


def with_a_block_of_a_compiled_class() -> nn.Module:
    return network(CompiledForward)


COMPILED: list[Callable[[], nn.Module]] = [
    wrapped,
    compiled_in_place,
    with_a_block_compiled_in_place,
    with_a_wrapped_block,
    with_a_compiled_forward,
    with_a_block_of_a_compiled_class,
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run_once(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.eval()(IMAGE)
    return model


@pytest.mark.parametrize("build", COMPILED)
def test_a_compiled_network_that_has_run_counts_as_much_as_any(build: Callable[[], nn.Module]) -> None:
    expected, counted = ss.count_macs(network(), IMAGE), ss.count_macs(run_once(build()), IMAGE)
    assert (counted.macs, counted.paper_flops) == (expected.macs, expected.paper_flops)


@pytest.mark.parametrize("build", COMPILED)
def test_a_network_is_as_compiled_after_counting_as_before(build: Callable[[], nn.Module]) -> None:
    model = run_once(build())
    before = [dict(vars(module)) for module in model.modules()]
    ss.count_macs(model, IMAGE)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_network_is_as_compiled_as_before_where_counting_fails() -> None:
    model = compiled_in_place()
    before = model._compiled_call_impl
    with pytest.raises(RuntimeError, match="channels"):
        ss.count_macs(model, torch.zeros(1, 5, 8, 8))
    assert before is not None
    assert model._compiled_call_impl is before


def test_a_plan_by_macs_is_the_same_once_a_block_is_compiled() -> None:
    torch.manual_seed(0)
    model = network()
    expected = ss.one_shot_plan(model, ss.SparsifyConfig(target=0.3, budget="macs"), example_inputs=IMAGE)
    model[1].compile(backend="eager")
    run_once(model)
    plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=0.3, budget="macs"), example_inputs=IMAGE)
    assert plan.layers == expected.layers
    assert plan.removed_mac_fraction == expected.removed_mac_fraction


def test_the_summary_counts_the_shuffles_of_a_compiled_network() -> None:
    model = network()
    ss.convert_(model, ss.one_shot_plan(model, 0.3))
    expected = ss.summary(model, IMAGE).gathers
    model.compile(backend="eager")
    assert expected
    assert ss.summary(run_once(model), IMAGE).gathers == expected


def test_shuffles_in_a_compiled_pass_are_noted() -> None:
    model = network()
    ss.convert_(model, ss.one_shot_plan(model, 0.3))
    expected = shuffles_in_pass(model, (IMAGE,))
    model.compile(backend="eager")
    assert expected
    assert shuffles_in_pass(run_once(model), (IMAGE,)) == expected


def test_other_networks_stay_compiled_while_one_is_counted() -> None:
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        def run(*arguments: torch.Tensor) -> object:
            calls.append(1)
            return graph.forward(*arguments)

        return run

    counted, trained = compiled_in_place(), network()
    trained.compile(backend=backend)
    run_once(trained)
    before = len(calls)
    with uncompiled(counted):
        thread = threading.Thread(target=run_once, args=(trained,))
        thread.start()
        thread.join()
    assert before > 0
    assert len(calls) == 2 * before


def test_networks_are_counted_in_threads_at_the_same_time() -> None:
    everyone_is_counting = threading.Barrier(2, timeout=60)

    class Waiting(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            everyone_is_counting.wait()
            return input

    expected = ss.count_macs(network(), IMAGE).macs
    models = [nn.Sequential(Waiting(), with_a_block_compiled_in_place(), Waiting()) for _ in range(2)]
    for model in models:
        run_once(model[1])
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda model=model: counts.append(ss.count_macs(model, IMAGE).macs)) for model in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [expected, expected]
