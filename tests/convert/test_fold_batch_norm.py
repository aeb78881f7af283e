import pytest
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.channels.tracing import other_norms_as_modules_, traced
from strucspars.convert.fold import fold_batch_norms_, fold_into_layer_
from strucspars.nn.layers import ShuffledGroupConv2d, ShuffledGroupLinear

IMAGES = torch.randn(3, 8, 6, 6, generator=torch.Generator().manual_seed(1))


def randomised(model: nn.Module) -> nn.Module:
    """Random statistics and scales: zeros and ones hide mistakes. Random shuffles too."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.5, 1.5)
        elif name.endswith(("in_perm", "out_inverse")):
            tensor.copy_(torch.randperm(len(tensor)))
    return model.eval()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.Conv2d, ShuffledGroupConv2d])
def test_the_layer_computes_the_norm_too(kind: type[nn.Conv2d], bias: bool, affine: bool) -> None:
    layer = randomised(kind(8, 12, 3, groups=4, bias=bias))
    norm = nn.BatchNorm2d(12, affine=affine)
    randomised(norm)
    with torch.no_grad():
        expected = norm(layer(IMAGES))
        fold_into_layer_(layer, norm)
        torch.testing.assert_close(layer(IMAGES), expected, rtol=1e-4, atol=1e-5)


def test_denormal_weights_become_zero() -> None:
    layer, norm = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1)
    nn.init.constant_(layer.weight, 1e-20)
    nn.init.constant_(norm.weight, 1e-20)
    fold_into_layer_(layer, norm.eval())
    assert layer.weight.item() == 0


def test_neither_weights_nor_biases_are_left_denormal() -> None:
    layer, norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4).eval()
    with torch.no_grad():
        layer.weight.fill_(1e-25)
        layer.get_parameter("bias").zero_()
        norm.weight.fill_(1e-15)
        norm.bias.fill_(1e-40)
    fold_into_layer_(layer, norm)
    assert not layer.weight.any()
    assert not layer.get_parameter("bias").any()


def folded_types(model: nn.Module, inputs: torch.Tensor) -> list[type[nn.Module]]:
    """Types of the called modules after folding, which must not change the function."""
    randomised(model)
    graph_module = traced(model, (inputs,))
    with torch.no_grad():
        expected = model(inputs)
        fold_batch_norms_(graph_module)
        graph_module.recompile()
        torch.testing.assert_close(graph_module(inputs), expected, rtol=1e-4, atol=1e-5)
    calls = [node.target for node in graph_module.graph.nodes if node.op == "call_module"]
    return [type(graph_module.get_submodule(str(target))) for target in calls]


def test_norms_after_convolutions_and_linear_layers_go() -> None:
    assert folded_types(nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), IMAGES) == [nn.Conv2d, nn.ReLU]
    assert folded_types(nn.Sequential(nn.Conv2d(8, 4, 3), nn.SyncBatchNorm(4)), IMAGES) == [nn.Conv2d]
    rows = torch.randn(3, 8)
    layer = ShuffledGroupLinear(8, 4, groups=2)
    assert folded_types(nn.Sequential(layer, nn.BatchNorm1d(4)), rows) == [ShuffledGroupLinear]


def test_norms_before_convolutions_after_nothing_and_over_another_axis_stay() -> None:
    before = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    assert folded_types(before, IMAGES) == [nn.BatchNorm2d, nn.ReLU, nn.Conv2d]
    other_axis = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(6))
    assert folded_types(other_axis, torch.randn(3, 6, 5)) == [nn.Linear, nn.BatchNorm1d]
    by_batch = nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    assert folded_types(by_batch, IMAGES) == [nn.Conv2d, nn.BatchNorm2d]


def test_a_norm_of_something_that_is_also_used_elsewhere_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)
            self.norm = nn.BatchNorm2d(8)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            convolved: torch.Tensor = self.conv(features)
            return convolved.add(self.norm(convolved))

    assert folded_types(Twice(), IMAGES) == [nn.Conv2d, nn.BatchNorm2d]


def test_norms_with_an_activation_become_modules_and_fold() -> None:
    model = randomised(nn.Sequential(ShuffledGroupConv2d(8, 8, 1, groups=2), BatchNormAct2d(8, eps=0.1)))
    graph_module = traced(model, (IMAGES,))
    with torch.no_grad():
        expected = model(IMAGES)
        other_norms_as_modules_(graph_module)
        graph_module.recompile()
        torch.testing.assert_close(graph_module(IMAGES), expected)
        fold_batch_norms_(graph_module)
        graph_module.recompile()
        torch.testing.assert_close(graph_module(IMAGES), expected, rtol=1e-4, atol=1e-5)
    called = [node.target for node in graph_module.graph.nodes if node.op == "call_module"]
    assert called == ["0", "1_drop_1", "1_act_1"]


def test_a_norm_without_scales_and_a_layer_is_a_module_in_every_precision() -> None:
    # No layer takes it in: it computes by itself, in double precision too, where graphs are compared.
    model = randomised(nn.Sequential(nn.ReLU(), BatchNormAct2d(8, affine=False)))
    folded = ss.fold(model, IMAGES)
    report = ss.fold_report(folded)
    assert (report.untraced_reason, report.num_kept_batch_norms) == ("", 1)
    torch.testing.assert_close(folded(IMAGES), model(IMAGES))


def test_a_function_that_normalises_by_the_batch_stays_in_the_graph() -> None:
    class ByBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return functional.batch_norm(
                self.layer(images), self.norm.running_mean, self.norm.running_var, training=True, momentum=0.0
            )

    model = randomised(ByBatch())
    folded = ss.fold(model, IMAGES)
    assert ss.fold_report(folded).untraced_reason == ""
    assert functional.batch_norm in [node.target for node in folded.graph.nodes]
    with torch.no_grad():
        torch.testing.assert_close(folded(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)


def test_a_convolution_that_is_called_twice_takes_in_both_norms() -> None:
    convolution = nn.Conv2d(8, 8, 1)
    model = nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU(), convolution, nn.BatchNorm2d(8))
    assert folded_types(model, IMAGES) == [nn.Conv2d, nn.ReLU, nn.Conv2d]
