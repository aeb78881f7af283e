"""Frozen batch norms of torchvision, whose detection backbones have them, and of timm fold as those in eval mode do."""

import logging

import pytest
import timm
import torch
from planned_networks import random_plan
from timm.layers.norm_act import FrozenBatchNormAct2d, freeze_batch_norm_2d
from torch import nn
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d

import strucspars as ss
from strucspars.cost.gathers import FoldReport

IMAGES = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(1))


class Subclass(FrozenBatchNorm2d):  # type: ignore[misc]  # torchvision has no types
    """May compute something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class Branching(nn.Module):
    """Cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 4, 1), FrozenBatchNorm2d(4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(input)
        return output if output.sum() > 0 else -output


def randomised(model: nn.Module) -> nn.Module:
    for name, tensor in model.named_buffers():
        if tensor.is_floating_point():
            nn.init.uniform_(model.get_buffer(name), 0.5, 1.5)
    return model.eval()


def report_of_equal(model: nn.Module, images: torch.Tensor = IMAGES, *, is_traceable: bool = True) -> FoldReport:
    folded = ss.fold(randomised(model), images)
    with torch.no_grad():
        torch.testing.assert_close(folded(images), model(images), rtol=1e-4, atol=1e-5)
    report = ss.fold_report(folded)
    # A network that is kept as it is computes the same, whatever became of its graph.
    assert (report.untraced_reason == "") is is_traceable
    return report


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_frozen_norms_go_into_the_layers_before_them() -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 3), FrozenBatchNorm2d(4, eps=0.1), nn.ReLU())
    folded = ss.fold(randomised(model), IMAGES)
    assert [node.op for node in folded.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert report_of_equal(model).num_kept_batch_norms == 0


def test_frozen_norms_that_no_layer_takes_in_are_counted() -> None:
    assert report_of_equal(nn.Sequential(FrozenBatchNorm2d(8), nn.Conv2d(8, 4, 3))).num_kept_batch_norms == 1


def test_frozen_norms_of_an_untraced_network_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        report = report_of_equal(Branching(), is_traceable=False)
    assert report.num_kept_batch_norms == 1


def test_shuffles_go_through_frozen_norms() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 1), FrozenBatchNorm2d(16), nn.ReLU(), FrozenBatchNorm2d(16))
    model.extend([nn.Conv2d(16, 16, 1), nn.Conv2d(16, 5, 1)])
    ss.convert_(model, ss.one_shot_plan(model, ss.SparsifyConfig(target=0.2, include=("4",))))
    assert report_of_equal(model).gathers == ()


def test_a_frozen_norm_that_is_called_twice_folds_into_both_layers() -> None:
    norm = FrozenBatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(8, 8, 1), norm, nn.Conv2d(8, 8, 1), norm)
    assert report_of_equal(model).num_kept_batch_norms == 0


def test_an_image_without_a_batch_is_still_given_one() -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 3), FrozenBatchNorm2d(4))
    assert report_of_equal(model, IMAGES[0]).num_kept_batch_norms == 1


def test_subclasses_and_hooks_keep_what_they_compute() -> None:
    hooked = FrozenBatchNorm2d(4)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert report_of_equal(nn.Sequential(nn.Conv2d(8, 4, 3), hooked, Subclass(4))).num_kept_batch_norms == 1


def test_a_frozen_backbone_folds_as_one_with_batch_norms() -> None:
    images = torch.randn(1, 3, 32, 32)
    frozen, plain = (
        resnet_fpn_backbone(backbone_name="resnet18", weights=None, norm_layer=norm_layer).eval()
        for norm_layer in (FrozenBatchNorm2d, nn.BatchNorm2d)
    )
    plan = random_plan(frozen)
    reports = [ss.fold_report(ss.fold(ss.convert_(model, plan), images)) for model in (frozen, plain)]
    assert reports[0] == reports[1]
    assert (reports[0].num_kept_batch_norms, reports[0].untraced_reason) == (0, "")


def test_the_activation_of_a_frozen_norm_stays() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 4, 3), FrozenBatchNormAct2d(4, act_layer=nn.Hardswish, drop_layer=nn.Dropout), nn.Conv2d(4, 4, 1)
    )
    assert report_of_equal(model).num_kept_batch_norms == 0
    folded = ss.fold(model, IMAGES)
    kinds = [type(folded.get_submodule(str(node.target))) for node in folded.graph.nodes if node.op == "call_module"]
    assert kinds == [nn.Conv2d, nn.Dropout, nn.Hardswish, nn.Conv2d]


def test_a_frozen_norm_with_an_activation_that_is_called_twice_has_it_twice() -> None:
    norm = FrozenBatchNormAct2d(8)
    model = nn.Sequential(nn.Conv2d(8, 8, 1), norm, nn.Conv2d(8, 8, 1), norm)
    assert report_of_equal(model).num_kept_batch_norms == 0
    assert report_of_equal(nn.Sequential(norm, nn.Conv2d(8, 4, 1)), IMAGES[0]).num_kept_batch_norms == 1


def test_a_frozen_network_of_timm_folds_as_the_one_it_was() -> None:
    # Its norms have activations inside.
    model = timm.create_model("mobilenetv3_small_050", num_classes=5).eval()
    images = torch.randn(1, 3, 32, 32)
    plan = ss.one_shot_plan(model, 0.3)
    expected = ss.fold_report(ss.fold(ss.convert_(model, plan), images))
    frozen = freeze_batch_norm_2d(model)  # type: ignore[no-untyped-call]  # untyped in timm
    assert any(isinstance(module, FrozenBatchNormAct2d) for module in frozen.modules())
    assert report_of_equal(frozen, images) == expected
    assert (expected.num_kept_batch_norms, expected.untraced_reason) == (0, "")


class CallsTheActivation(nn.Module):
    """Uses a part of a frozen norm by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(8, 8, 1), FrozenBatchNormAct2d(8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self.norm.act(self.layer(self.norm(self.layer(images))))
        return activated


def test_the_activation_of_a_frozen_norm_may_be_called_by_itself() -> None:
    assert report_of_equal(CallsTheActivation()).num_kept_batch_norms == 0
