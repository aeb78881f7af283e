import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import strucspars as ss


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)).eval()


def test_compress_plans_converts_and_reconstructs() -> None:
    compressed, by_hand, dense = network(), network(), network()
    images = torch.randn(2, 8, 4, 9, 9)
    plan = ss.compress(compressed, 0.4, calibration=zip(images, torch.zeros(2, 8), strict=True))
    assert ss.one_shot_plan(by_hand, 0.4, calibration=images) == plan
    assert plan.predicted_divergence is not None
    ss.reconstruct_(ss.convert_(by_hand, plan), dense, images)
    torch.testing.assert_close(compressed.state_dict(), by_hand.state_dict(), rtol=0, atol=0)


def test_a_plan_made_before_is_carried_out() -> None:
    at_once, in_steps = network(), network()
    images = torch.randn(2, 8, 4, 9, 9)
    plan = ss.one_shot_plan(in_steps, 0.4, calibration=images)
    assert ss.compress(in_steps, plan, calibration=images) is plan
    ss.compress(at_once, 0.4, calibration=images)
    torch.testing.assert_close(in_steps.state_dict(), at_once.state_dict(), rtol=0, atol=0)


def test_only_the_first_1024_images_are_read() -> None:
    read = 0

    def batches() -> Iterator[torch.Tensor]:
        nonlocal read
        while True:
            read += 1
            yield torch.zeros(512, 4, 3, 3)

    ss.compress(nn.Sequential(nn.Conv2d(4, 8, 3)), 0.4, calibration=batches())
    assert read == 2


def test_without_images_a_warning_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    ss.compress(network(), 0.4)
    assert "without images the network is not usable as it is: give calibration=batches" in caplog.text


def test_without_calibration_the_statistics_stay() -> None:
    model = network()
    before = {name: value.clone() for name, value in model[3].state_dict().items()}
    ss.compress(model, 0.4)
    torch.testing.assert_close(dict(model[3].state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("with_norms", [True, False])
def test_empty_calibration_is_refused_before_anything_changes(with_norms: bool) -> None:
    model = network() if with_norms else nn.Sequential(nn.Conv2d(4, 8, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="calibration holds no batch"):
        ss.compress(model, 0.4, calibration=iter(()))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert type(model[0]) is nn.Conv2d
