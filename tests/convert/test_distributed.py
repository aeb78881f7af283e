"""Conversion of networks that are wrapped for distributed training."""

import pytest
from torch import nn

from strucspars.convert.conversion import convert_, mask_
from strucspars.sparsify.one_shot import one_shot_plan


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))


@pytest.mark.usefixtures("_one_process")
def test_a_wrapper_that_knows_the_old_shapes_is_said_to_be_renewed(caplog: pytest.LogCaptureFixture) -> None:
    wrapped = nn.parallel.DistributedDataParallel(_network())
    plan = one_shot_plan(wrapped, target=0.3)
    caplog.clear()
    mask_(wrapped, plan)
    assert not caplog.records
    convert_(wrapped, plan)
    assert "wrap the network again" in caplog.text
    caplog.clear()
    convert_(nn.parallel.DistributedDataParallel(wrapped.module), plan)
    assert not caplog.records, "nothing changes any more"


@pytest.mark.usefixtures("_one_process")
def test_a_wrapper_around_a_part_is_said_to_be_renewed_too(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.parallel.DistributedDataParallel(_network()), nn.ReLU())
    plan = one_shot_plan(model, target=0.3)
    caplog.clear()
    convert_(model, plan)
    assert "wrap the network again" in caplog.text


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["bare", "parallel"])
def test_others_need_no_renewal(wrap: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    model = wrap(_network())
    plan = one_shot_plan(model, target=0.3)
    caplog.clear()
    convert_(model, plan)
    assert not caplog.records
