import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.models.cifar import CifarResNet, PreactivationResNet
from strucspars.nn.layers import GroupLinear
from strucspars.train.slimming import ChannelSelection, SelectedBatchNorm2d, norm_sites, select_channels, slim_

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
NETWORKS: list[Callable[[], nn.Module]] = [lambda: PreactivationResNet(20), lambda: CifarResNet(20)]
BOTH = pytest.mark.parametrize("build", NETWORKS, ids=["pre-activation", "post-activation"])


def lively(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A network whose norms have scales, shifts and statistics that matter."""
    torch.manual_seed(seed)
    model = build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.get_buffer("running_mean"), std=0.5)
            nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2)
    return model


def random_selection(model: nn.Module, seed: int = 0) -> ChannelSelection:
    """Any number of channels from each norm: one only, some, or all."""
    rng = np.random.default_rng(seed)
    widths = {site.norm: site.width for site in norm_sites(model)}
    sizes = {name: int(rng.choice([1, int(rng.integers(1, width)), width])) for name, width in widths.items()}
    kept = {name: np.sort(rng.choice(width, size=sizes[name], replace=False)) for name, width in widths.items()}
    return ChannelSelection(kept, widths)


def masked(model: nn.Module, selection: ChannelSelection) -> nn.Module:
    """The dense network with scale and shift of the removed channels at zero."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, kept in selection.kept.items():
            removed = np.setdiff1d(np.arange(selection.widths[name]), kept)
            for parameter in model.get_submodule(name).parameters():
                parameter[torch.tensor(removed)] = 0
    return model


def num_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@BOTH
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("training", [False, True])
def test_the_slim_network_equals_the_masked_one(build: Callable[[], nn.Module], seed: int, training: bool) -> None:
    model = lively(build, seed).double().train(training)
    selection = random_selection(model, seed)
    reference, dense_scores = masked(model, selection), copy.deepcopy(model)(IMAGES.double())
    slim_(model, selection)
    scores = model(IMAGES.double())
    torch.testing.assert_close(scores, reference(IMAGES.double()), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(scores, dense_scores, rtol=1e-2, atol=1e-2)


@BOTH
def test_a_training_step_moves_kept_weights_as_in_the_masked_network(build: Callable[[], nn.Module]) -> None:
    model = lively(build).double().train()
    selection = random_selection(model)
    reference = masked(model, selection)
    slim_(model, selection)
    for network in (model, reference):
        torch.autograd.backward(network(IMAGES.double()).square().mean())
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    for name, kept in selection.kept.items():
        own, dense = model.get_parameter(f"{name}.weight").grad, reference.get_parameter(f"{name}.weight").grad
        assert own is not None
        assert dense is not None
        torch.testing.assert_close(own, dense[torch.tensor(kept)], rtol=1e-6, atol=1e-9)
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert model(IMAGES.double()).isfinite().all()


def test_narrow_layers_know_their_widths() -> None:
    model = PreactivationResNet(20)
    selection = random_selection(model)
    slim_(model, selection)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels)
        elif isinstance(module, nn.BatchNorm2d):
            assert module.weight.shape == (module.num_features,)
    assert model.fc.in_features == model.fc.weight.shape[1] == len(selection.kept["bn"])
    # MACs are counted from the modules, so they follow.
    assert ss.count_macs(model, IMAGES[:1]).params == num_params(model)


def test_the_residual_stream_keeps_its_width() -> None:
    model, dense = PreactivationResNet(20), PreactivationResNet(20)
    slim_(model, random_selection(model))
    for name, module in dense.named_modules():
        if name.endswith(("conv3", "shortcut")) and isinstance(module, nn.Conv2d):
            own = model.get_submodule(name)
            assert isinstance(own, nn.Conv2d)
            assert own.out_channels == module.out_channels
            assert name.endswith("conv3") or own.in_channels == module.in_channels


def test_only_norms_inside_basic_blocks_narrow() -> None:
    assert [site.norm for site in norm_sites(CifarResNet(8))] == [f"layer{stage}.0.bn1" for stage in (1, 2, 3)]


@BOTH
def test_one_channel_in_every_norm_is_enough_to_train(build: Callable[[], nn.Module]) -> None:
    model = lively(build)
    widths = {site.norm: site.width for site in norm_sites(model)}
    selection = ChannelSelection({name: np.array([width - 1]) for name, width in widths.items()}, widths)
    reference = masked(model, selection).eval()
    slim_(model, selection).eval()
    torch.testing.assert_close(model(IMAGES), reference(IMAGES), rtol=1e-4, atol=1e-4)
    torch.autograd.backward(model.train()(IMAGES).square().mean())
    assert all(parameter.grad is not None for parameter in model.parameters())


@BOTH
def test_keeping_everything_changes_nothing(build: Callable[[], nn.Module]) -> None:
    model = build()
    widths = {site.norm: site.width for site in norm_sites(model)}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slim_(model, ChannelSelection({name: np.arange(width) for name, width in widths.items()}, widths))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not any(isinstance(module, SelectedBatchNorm2d) for module in model.modules())


@BOTH
def test_the_state_fits_a_fresh_network_slimmed_alike(build: Callable[[], nn.Module]) -> None:
    model = lively(build)
    selection = random_selection(model)
    slim_(model, selection).eval()
    fresh = slim_(build(), ChannelSelection.from_json(selection.to_json())).eval()
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(fresh(IMAGES), model(IMAGES))


def test_parameters_modes_and_layout_survive() -> None:
    model = PreactivationResNet(20).to(memory_format=torch.channels_last).bfloat16().eval()
    parameters = list(model.parameters())
    model.layer1.requires_grad_(False)
    torch.autograd.backward(model(IMAGES.bfloat16()).square().sum())
    gradient = copy.deepcopy(model.get_parameter("layer2.0.conv2.weight").grad)
    widths = {site.norm: site.width for site in norm_sites(model)}
    selection = ChannelSelection({name: np.arange(1, width, 2) for name, width in widths.items()}, widths)
    slim_(model, selection)
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    assert not model.training
    assert not model.get_parameter("layer1.0.conv1.weight").requires_grad
    weight = model.get_parameter("layer2.0.conv2.weight")
    assert weight.dtype == torch.bfloat16
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    rows, columns = (torch.tensor(selection.kept[f"layer2.0.bn{index}"]) for index in (3, 2))
    assert gradient is not None
    assert weight.grad is not None
    assert torch.equal(weight.grad, gradient[rows][:, columns])


def test_a_graph_that_is_still_alive_does_no_harm() -> None:
    model = CifarResNet(8)
    loss = model(IMAGES).square().mean()
    slim_(model, random_selection(model, seed=1))
    torch.autograd.backward(model(IMAGES).square().mean())
    weight = model.get_parameter("layer1.0.conv1.weight")
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert loss.requires_grad


@pytest.mark.parametrize("model", [nn.Sequential(nn.BatchNorm2d(4)), nn.Sequential(CifarResNet(8))])
def test_other_networks_are_refused_by_name(model: nn.Module) -> None:
    empty = ChannelSelection({}, {})
    for use in (lambda: slim_(model, empty), lambda: norm_sites(model)):
        with pytest.raises(ValueError, match="PreactivationResNet and CifarResNet only, got Sequential"):
            use()


@BOTH
def test_a_slim_network_is_not_slimmed_again(build: Callable[[], nn.Module]) -> None:
    model = build()
    selection = select_channels(model, target=0.5)
    slim_(model, selection)
    state = copy.deepcopy(model.state_dict())
    for use in (lambda: slim_(model, selection), lambda: select_channels(model, target=0.5)):
        with pytest.raises(ValueError, match=r"of its \d+ channels, so the network is slim already"):
            use()
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def test_a_network_with_changed_layers_is_refused() -> None:
    selection = random_selection(CifarResNet(8))
    grouped, folded, biased = CifarResNet(8), CifarResNet(8), CifarResNet(8)
    ss.convert_(grouped, ss.one_shot_plan(grouped, target=0.5))
    with pytest.raises(ValueError, match=r"layer 'layer1.0.conv1' is ShuffledGroupConv2d.*slim before"):
        slim_(grouped, selection)
    folded.set_submodule("layer2.0.bn1", nn.Identity())
    with pytest.raises(ValueError, match=r"'layer2.0.bn1' is Identity\(\), slimming needs a BatchNorm2d"):
        slim_(folded, selection)
    biased.set_submodule("layer2.0.conv1", nn.Conv2d(16, 32, 3, stride=2, padding=1))
    with pytest.raises(ValueError, match=r"layer 'layer2.0.conv1' is Conv2d"):
        slim_(biased, selection)
    assert biased.get_parameter("layer1.0.conv1.weight").shape[0] == 16  # nothing changed before the error


@pytest.mark.parametrize(
    ("name", "layer", "complaint"),
    [
        ("layer2.0.bn1", nn.BatchNorm2d(32, affine=False), "'layer2.0.bn1' is BatchNorm2d.* with a scale"),
        ("layer2.0.bn1", SelectedBatchNorm2d(32), "'layer2.0.bn1' is SelectedBatchNorm2d"),
        ("layer2.0.conv1", nn.Conv2d(16, 32, 3, 2, 1, groups=2, bias=False), r"layer 'layer2.0.conv1' is .*groups=2"),
        ("layer2.0.conv2", nn.Conv2d(32, 32, 3, 1, 1, groups=2, bias=False), r"layer 'layer2.0.conv2' is .*groups=2"),
    ],
)
def test_a_layer_of_another_kind_is_refused(name: str, layer: nn.Module, complaint: str) -> None:
    model = CifarResNet(8)
    model.set_submodule(name, layer)
    with pytest.raises(ValueError, match=complaint):
        slim_(model, random_selection(CifarResNet(8)))
    assert model.get_parameter("layer1.0.conv1.weight").shape[0] == 16  # nothing changed before the error


def test_a_grouped_classifier_is_refused() -> None:
    model = PreactivationResNet(11)
    selection = random_selection(model)
    model.fc = GroupLinear(256, 10, groups=2)
    with pytest.raises(ValueError, match="layer 'fc' is GroupLinear"):
        slim_(model, selection)


def test_a_norm_without_statistics_is_slimmed_too() -> None:
    model = CifarResNet(8)
    model.set_submodule("layer1.0.bn1", nn.BatchNorm2d(16, track_running_stats=False))
    widths = {site.norm: site.width for site in norm_sites(model)}
    selection = ChannelSelection({name: np.array([1, 3]) for name in widths}, widths)
    reference = masked(model, selection)
    torch.testing.assert_close(slim_(model, selection)(IMAGES), reference(IMAGES), rtol=1e-4, atol=1e-4)


def test_a_selection_of_another_depth_changes_nothing() -> None:
    model = PreactivationResNet(29)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError,
        match=r"another network: batch norm 'layer1\.2\.bn1' has 64 channels, but the selection was made for none",
    ):
        slim_(model, random_selection(PreactivationResNet(20)))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_slim_network_compiles_as_one_graph() -> None:
    model = lively(lambda: PreactivationResNet(20))
    slim_(model, random_selection(model)).eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(IMAGES), model(IMAGES))
