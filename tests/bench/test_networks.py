"""The networks that the bench times: random, but the same every time."""

import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.bench.networks import (
    BenchNetwork,
    conv_params,
    networks_of_run,
    random_networks,
    trained_networks,
    with_random_norms,
)
from strucspars.convert.conversion import convert_, plan_of
from strucspars.models.catalogue import build_model
from strucspars.nn.layers import channel_orders, is_grouped
from strucspars.nn.names import copied

SHAPE = (3, 32, 32)


def small_networks(seed: int = 0) -> list[BenchNetwork]:
    return random_networks("cifar-resnet8", [0.5, 0.7], image_shape=SHAPE, num_classes=10, seed=seed)


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        scores: torch.Tensor = model(torch.linspace(-2, 2, 2 * 3 * 32 * 32).reshape(2, *SHAPE))
    return scores


def test_the_same_seed_gives_the_same_networks_and_another_one_others() -> None:
    first, again, other = ([outputs(network.model) for network in small_networks(seed)] for seed in (0, 0, 1))
    for network, same, different in zip(first, again, other, strict=True):
        torch.testing.assert_close(network, same)
        assert not torch.allclose(network, different)


def test_building_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    small_networks()
    assert torch.equal(torch.get_rng_state(), before)


def test_every_rate_has_a_network_and_a_bound_of_the_same_size() -> None:
    networks = small_networks()
    assert [(network.form, network.rate) for network in networks] == [
        ("dense", None),
        ("compressed", 0.5),
        ("bound", 0.5),
        ("compressed", 0.7),
        ("bound", 0.7),
    ]
    for compressed, bound in ((networks[1], networks[2]), (networks[3], networks[4])):
        counts = [ss.count_macs(each.model, torch.zeros(1, *SHAPE)) for each in (compressed, bound)]
        assert counts[0] == counts[1]
        removed = 1 - conv_params(compressed.model) / conv_params(networks[0].model)
        assert compressed.rate is not None
        assert removed >= compressed.rate


def test_only_the_bound_folds_to_nothing() -> None:
    _, _, _, compressed, bound = small_networks()
    gathers = [len(ss.fold_report(ss.fold(each.model, torch.randn(1, *SHAPE))).gathers) for each in (compressed, bound)]
    assert gathers[0] > 0
    assert gathers[1] == 0
    assert not torch.allclose(outputs(compressed.model), outputs(bound.model))


def test_all_orders_of_a_random_network_are_shuffles() -> None:
    grouped = [module for module in small_networks()[3].model.modules() if is_grouped(module)]
    assert grouped
    for module in grouped:
        for order in channel_orders(module).values():
            assert not torch.equal(order, torch.arange(len(order)))


def test_orders_of_trained_weights_are_learned_from_them_by_every_policy() -> None:
    dense = build_model("cifar-resnet8", num_classes=10).eval()
    policies = ("free", "shared")
    networks = trained_networks(dense, "cifar-resnet8", [0.6], image_shape=SHAPE, orders=policies)
    drawn = random_networks("cifar-resnet8", [0.6], image_shape=SHAPE, num_classes=10, orders=policies)
    assert [(each.form, each.orders) for each in networks] == [(each.form, each.orders) for each in drawn]
    plan = plan_of(drawn[1].model)
    assert plan is not None
    at_random, *kept = (
        sum(float(each.weight.detach().abs().sum()) for each in model.modules() if isinstance(each, nn.Conv2d))
        for model in (convert_(copied(dense), plan), *(network.model for network in networks))
    )
    assert kept[0] > kept[1] > at_random
    assert kept[2] > at_random
    gathers = [len(ss.fold_report(ss.fold(each.model, torch.randn(1, *SHAPE))).gathers) for each in networks[1:3]]
    assert gathers[1] < gathers[0]


def test_random_networks_have_no_groups_narrower_than_asked_for() -> None:
    with pytest.raises(ValueError, match=r"rate 0\.6 cannot be reached.*lower the rate or min_channels_per_group"):
        random_networks("cifar-resnet8", [0.6], image_shape=SHAPE, num_classes=10, min_channels_per_group=16)


def test_activations_neither_vanish_nor_grow_and_nothing_is_left_at_its_default() -> None:
    for network in small_networks():
        scores = outputs(network.model)
        assert 0.01 < scores.abs().max() < 100
        for module in network.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                assert not module.training
                assert module.momentum == 0.1
                for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                    assert tensor.std() > 0


def test_batch_norms_without_statistics_or_parameters_are_no_obstacle() -> None:
    norms = nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *norms, nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4)).eval()
    with_random_norms(model, (3, 8, 8), seed=0)
    assert torch.equal(norms[1].weight, torch.ones(4))


def test_a_channel_that_is_always_zero_is_not_divided_by_next_to_nothing() -> None:
    convolution, norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
    nn.init.zeros_(convolution.weight)
    with_random_norms(nn.Sequential(convolution, norm).eval(), (3, 8, 8), seed=0)
    assert norm.running_var is not None
    assert norm.running_var.tolist() == pytest.approx([0.01] * 4)


def test_a_network_that_fails_on_such_images_keeps_its_momenta_and_mode() -> None:
    norm = nn.BatchNorm2d(3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        with_random_norms(nn.Sequential(norm, nn.Linear(7, 7)).eval(), (3, 8, 8), seed=0)
    assert (norm.momentum, norm.training) == (0.1, False)


def test_a_run_is_compared_with_its_dense_network() -> None:
    dense, compressed = (build_model("cifar-resnet8", num_classes=10) for _ in range(2))
    ss.convert_(compressed, ss.one_shot_plan(compressed, target=0.4))
    before = outputs(compressed.eval())
    networks = networks_of_run(dense, compressed, SHAPE)
    assert [network.form for network in networks] == ["dense", "compressed", "bound"]
    removed = 1 - conv_params(networks[1].model) / conv_params(networks[0].model)
    assert networks[1].rate == pytest.approx(removed, abs=1e-4)
    torch.testing.assert_close(outputs(networks[1].model), before)


def test_networks_of_a_run_are_in_evaluation_mode_and_the_dense_one_has_random_norms() -> None:
    dense, compressed = (build_model("cifar-resnet8", num_classes=10).train() for _ in range(2))
    ss.convert_(compressed, ss.one_shot_plan(compressed, target=0.4))
    networks = networks_of_run(dense, compressed, SHAPE)
    assert not [network.form for network in networks for module in network.model.modules() if module.training]
    for norm in (module for module in networks[0].model.modules() if isinstance(module, nn.BatchNorm2d)):
        assert norm.running_mean is not None
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            assert tensor.std() > 0


def test_a_network_without_shuffles_has_no_bound() -> None:
    narrow = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    wide = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 3))
    networks = networks_of_run(wide, narrow, SHAPE)
    assert [(network.form, network.rate) for network in networks] == [("dense", None), ("compressed", 0.5)]


def test_a_run_that_removed_nothing_is_dense_and_alone() -> None:
    fresh, trained = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)) for _ in range(2))
    (network,) = networks_of_run(fresh, trained, SHAPE)
    assert (network.form, network.rate) == ("dense", None)
    assert network.model is trained
    assert not trained.training
