import copy

import pytest
import torch
from torch import nn

import strucspars as ss


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)).eval()


def test_calibration_fits_the_batch_norms_to_the_converted_network() -> None:
    compressed, by_hand = network(), network()
    images = torch.randn(2, 8, 4, 9, 9)
    plan = ss.compress(compressed, 0.4, calibration=zip(images, torch.zeros(2, 8), strict=True))
    assert ss.convert_(by_hand, plan) is by_hand
    dense_statistics = copy.deepcopy(by_hand.state_dict())
    ss.recalibrate_(by_hand, images)
    torch.testing.assert_close(compressed.state_dict(), by_hand.state_dict(), rtol=0, atol=0)
    assert not torch.allclose(compressed.state_dict()["3.running_var"], dense_statistics["3.running_var"])


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
