import pytest
import torch
from torch import nn
from torch.testing import assert_close

from strucspars.models.cifar import PreactivationResNet
from strucspars.train.epochs import counters_set_aside
from strucspars.train.steps import CastAtOnce


def losses_and_gradients(
    model: nn.Module, cast: CastAtOnce | None, images: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (cast or model)(images).float().logsumexp(dim=1).mean()
    torch.autograd.backward(loss)
    if cast is not None:
        cast.collect_gradients_()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_casting_all_weights_at_once_computes_what_autocast_does() -> None:
    torch.manual_seed(0)
    model = PreactivationResNet(20)
    images = torch.randn(4, 3, 16, 16)
    expected_loss, expected = losses_and_gradients(model, None, images)
    loss, gradients = losses_and_gradients(model, CastAtOnce(model, torch.bfloat16), images)
    assert len(gradients) == len(expected) == len(list(model.parameters()))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert_close(loss, expected_loss)
    assert_close(gradients, expected)


def test_a_compiled_cast_trains_as_the_plain_one() -> None:
    """Step by step: a graph that had kept the first copies would fall behind."""
    images = torch.randn(4, 3, 16, 16)
    losses: dict[bool, list[torch.Tensor]] = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model = PreactivationResNet(20)
        cast = CastAtOnce(model, torch.bfloat16)
        forward = torch.compile(cast, backend="aot_eager") if compiled else cast
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses[compiled] = []
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = forward(images).float().logsumexp(dim=1).mean()
            torch.autograd.backward(loss)
            cast.collect_gradients_()
            optimizer.step()
            losses[compiled].append(loss.detach())
    assert losses[False][0] != losses[False][2]
    assert_close(losses[True], losses[False], rtol=1e-2, atol=0)


def test_cast_weights_follow_the_weights_they_are_copies_of() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.LazyLinear(2))
    images = torch.randn(2, 3, 4, 4)
    model(images)
    cast = CastAtOnce(model, torch.bfloat16)
    before = cast(images.bfloat16()).float()
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)
        model.get_parameter("0.bias").mul_(2)
        model.get_parameter("2.bias").zero_()
    after = cast(images.bfloat16()).float()
    assert not torch.equal(before, after)
    assert_close(after, model(images), rtol=0.05, atol=0.05)


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "frozen": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.layers["frozen"](self.layers["used"](features))
            return hidden

    cast = CastAtOnce(Chain(), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.backward(cast(torch.ones(1, 2)).sum())
    cast.collect_gradients_()
    assert model["used"].weight.grad is not None
    assert model["frozen"].weight.grad is None
    assert model["unused"].weight.grad is None


def test_counters_of_batch_norms_come_back_as_the_same_tensors_uncounted() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(2), nn.BatchNorm2d(2, momentum=None), nn.BatchNorm2d(2, track_running_stats=False)
    )
    counter = model[0].num_batches_tracked
    with counters_set_aside(model) as counters:
        assert model[0].num_batches_tracked is None
        model(torch.randn(2, 2, 3, 3))
    assert counters == [counter]
    assert model[0].num_batches_tracked is counter
    assert counter == 0
    # The plain mean of all batches needs its count.
    assert model[1].num_batches_tracked == 1
    assert not torch.equal(model[0].running_mean, torch.zeros(2))


def test_counters_of_batch_norms_come_back_after_an_error_too() -> None:
    norm = nn.BatchNorm2d(2)
    counter = norm.num_batches_tracked
    with pytest.raises(RuntimeError, match="out of memory"), counters_set_aside(norm):
        raise RuntimeError("out of memory")
    assert norm.num_batches_tracked is counter


def test_a_weight_that_two_layers_share_is_cast_once_and_gets_both_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    inputs = torch.randn(4, 3)
    expected_loss, expected = losses_and_gradients(model, None, inputs)
    loss, gradients = losses_and_gradients(model, CastAtOnce(model, torch.bfloat16), inputs)
    assert_close(loss, expected_loss)
    assert_close(gradients, expected)


def test_a_layer_that_computes_with_its_weight_first_does_so_in_full_precision() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            assert self.weight.dtype == torch.float32
            convolved: torch.Tensor = self._conv_forward(features, self.weight - self.weight.mean(), self.bias)
            return convolved

    cast = CastAtOnce(nn.Sequential(Standardised(2, 2, 1), nn.Conv2d(2, 2, 1)), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert cast(torch.ones(1, 2, 3, 3)).dtype == torch.bfloat16


def test_the_gradients_of_a_step_hold_nothing_of_the_step_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    images = torch.randn(2, 3, 4, 4)
    cast = CastAtOnce(model, torch.bfloat16)
    first, again = (losses_and_gradients(model, cast, images)[1] for _ in range(2))
    assert_close(again, first, rtol=0, atol=0)
