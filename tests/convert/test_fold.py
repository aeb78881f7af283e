"""Every rule of the graph on small networks: the function stays, and as many gathers remain as reasoning says."""

import copy
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import strucspars as ss
from strucspars.nn.layers import GroupLinear, ShuffledGroupLinear

CHANNELS, GROUPS = 16, 4
IMAGES = torch.randn(3, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(1))


def shuffled(
    in_channels: int = CHANNELS, out_channels: int = CHANNELS, kernel_size: int = 3, *, groups: int = GROUPS
) -> ss.ShuffledGroupConv2d:
    """A grouped convolution with random orders."""
    layer = ss.ShuffledGroupConv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, groups=groups)
    layer.in_perm.copy_(torch.randperm(in_channels))
    layer.out_inverse.copy_(torch.randperm(out_channels))
    return layer


def dense(in_channels: int = CHANNELS, out_channels: int = CHANNELS) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 1)


def between_dense(*layers: nn.Module) -> nn.Sequential:
    """Dense convolutions at both ends, where every shuffle can go."""
    return nn.Sequential(dense(), *layers, dense())


def randomised(model: nn.Module) -> nn.Module:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.5, 1.5)
    return model.eval()


def folded_equal(model: nn.Module, images: torch.Tensor = IMAGES) -> fx.GraphModule:
    """Fold a network; the graph must be traced, compute the same, and gather by `index_select` where it says."""
    randomised(model)
    folded = ss.fold(model, images)
    report = ss.fold_report(folded)
    assert report.untraced_reason == ""
    others = torch.randn(images.shape[0] + 1, *images.shape[1:])
    with torch.no_grad():
        torch.testing.assert_close(folded(others), model(others), rtol=1e-4, atol=1e-5)
    selects = [node for node in folded.graph.nodes if node.target is torch.index_select]
    assert len(selects) == len(report.gathers)
    return folded


def remaining(model: nn.Module, images: torch.Tensor = IMAGES) -> list[tuple[str, str]]:
    """Layer and side of every gather that is left."""
    return [(gather.layer, gather.side) for gather in ss.fold_report(folded_equal(model, images)).gathers]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


CHANNELWISE: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "hard swish": nn.Hardswish,
    "dropout": nn.Dropout,
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
    "relu and batch norm": lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(CHANNELS)),
    "batch norm by batch": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "max pool": lambda: nn.MaxPool2d(2),
    "average pool": lambda: nn.AvgPool2d(3, stride=2, padding=1),
    "adaptive pool": lambda: nn.AdaptiveAvgPool2d(3),
    "upsampling": lambda: nn.Upsample(scale_factor=2),
    "padding": lambda: nn.ZeroPad2d(1),
    "depthwise": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS),
}


@pytest.mark.parametrize("name", CHANNELWISE)
def test_shuffles_go_through_whatever_treats_channels_alike(name: str) -> None:
    assert remaining(between_dense(CHANNELWISE[name](), shuffled(kernel_size=1))) == []
    assert remaining(between_dense(shuffled(kernel_size=1), CHANNELWISE[name]())) == []


class Functions(nn.Module):
    """A function between a shuffled convolution and a dense one."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = dense()
        self.grouped = shuffled()
        self.last = dense()
        self.function = function

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.function(self.grouped(self.first(images))))
        return output


def squeezed_and_excited(features: torch.Tensor) -> torch.Tensor:
    return features * features.mean((2, 3), keepdim=True).sigmoid()


def changed_in_place(features: torch.Tensor) -> torch.Tensor:
    functional.relu_(features)
    features[:, :, 2:].mul_(2)
    return features + 1


FREE_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "functional relu": functional.relu,
    "method": lambda features: features.relu_().mul(0.5),
    "scalar": lambda features: (features + 1) / 2,
    "gate": squeezed_and_excited,
    "added in place": lambda features: features.add_(features.tanh()),
    "changed in place, result ignored": changed_in_place,
    "slice of positions": lambda features: features[:, :, ::2, 1:],
    "pad of positions": lambda features: functional.pad(features, (1, 2, 0, 1)),
    "functional pooling": lambda features: functional.max_pool2d(functional.avg_pool2d(features, 2), 2),
    "interpolation": lambda features: functional.interpolate(features, scale_factor=2),
    "concatenated positions": lambda features: torch.cat([features, features.relu()], dim=-1),
    "asked for its shape": lambda features: features * (features.shape[2] / features.size(3)),
}
NATURAL_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax over channels": lambda features: functional.softmax(features, dim=1),
    "channel shuffle": lambda features: features.view(features.size(0), 2, -1, 8, 8).transpose(1, 2).flatten(1, 2),
    "largest of all channels": lambda features: features * features.amax(1, keepdim=True),
    "flip of channels": lambda features: features.flip(1),
    "sum over channels": lambda features: features - features.cumsum(1),
    "constant per channel": lambda features: features * torch.arange(CHANNELS).view(1, -1, 1, 1),
    "other axis": lambda features: functional.max_pool2d(features.transpose(1, 2), 1).transpose(1, 2),
    "unknown split": lambda features: torch.cat(features.chunk(2, dim=1)[::-1], dim=1),
}


@pytest.mark.parametrize("name", FREE_FUNCTIONS)
def test_shuffles_go_through_functions_that_treat_channels_alike(name: str) -> None:
    assert remaining(Functions(FREE_FUNCTIONS[name])) == []


@pytest.mark.parametrize("name", NATURAL_FUNCTIONS)
def test_what_looks_at_the_order_of_channels_gets_the_natural_one(name: str) -> None:
    assert remaining(Functions(NATURAL_FUNCTIONS[name])) == [("grouped", "output")]


def test_inputs_and_outputs_of_the_graph_are_in_natural_order() -> None:
    assert remaining(nn.Sequential(shuffled(), nn.ReLU())) == [("0", "input"), ("0", "output")]


def test_dense_layers_on_one_side_leave_the_gather_of_the_other() -> None:
    assert remaining(nn.Sequential(shuffled(), dense())) == [("0", "input")]
    assert remaining(nn.Sequential(dense(), shuffled())) == [("1", "output")]


def test_two_grouped_layers_in_a_row_share_one_gather() -> None:
    assert len(remaining(between_dense(shuffled(), nn.BatchNorm2d(CHANNELS), nn.ReLU(), shuffled()))) == 1


def test_a_gather_comes_after_the_activation_so_that_a_runtime_can_join_it_to_the_layer_before() -> None:
    folded = folded_equal(between_dense(shuffled(), nn.BatchNorm2d(CHANNELS), nn.ReLU(), shuffled()))
    (gather,) = [node for node in folded.graph.nodes if node.target is torch.index_select]
    (source,) = [node for node in gather.all_input_nodes if node.op == "call_module"]
    assert isinstance(folded.get_submodule(str(source.target)), nn.ReLU)


def test_two_grouped_layers_whose_orders_match_need_none() -> None:
    first, second = shuffled(), shuffled()
    # The second reads exactly as the first puts out, up to the order within groups and that of the groups.
    out_perm = torch.argsort(first.out_inverse).view(GROUPS, -1)
    second.in_perm.copy_(out_perm[torch.randperm(GROUPS)].flip(1).flatten())
    assert remaining(between_dense(first, nn.ReLU(), second)) == []


def test_coarser_groups_that_hold_the_finer_ones_need_none() -> None:
    first, second = shuffled(groups=8), shuffled(groups=2)
    out_perm = torch.argsort(first.out_inverse).view(8, -1)
    second.in_perm.copy_(out_perm[torch.randperm(8)].flatten())
    assert remaining(between_dense(first, nn.ReLU(), second)) == []


def test_grouped_convolutions_of_the_network_itself_are_matched_too() -> None:
    network_own = nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, groups=GROUPS)
    assert remaining(nn.Sequential(dense(), network_own, nn.ReLU(), dense(2 * CHANNELS))) == []
    assert len(remaining(between_dense(shuffled(), nn.Conv2d(CHANNELS, CHANNELS, 3, groups=GROUPS)))) == 1


class Residual(nn.Module):
    """Blocks of grouped convolutions around one stream, added in place."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first, self.last = dense(), dense()
        self.blocks = nn.ModuleList(shuffled(kernel_size=1) for _ in range(blocks))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stream = self.first(images)
        for block in self.blocks:
            branch = block(stream)
            branch += stream
            stream = functional.relu(branch)
        output: torch.Tensor = self.last(stream)
        return output


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_residual_stream_suits_one_side_of_all_that_meet_it(blocks: int) -> None:
    # 2 sides per block look at one stream; all but one of them find it in another's order.
    assert len(remaining(Residual(blocks))) == 2 * blocks - 1


def test_a_bottleneck_between_dense_layers_keeps_its_stream_free() -> None:
    class Bottleneck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Sequential(dense(), nn.BatchNorm2d(CHANNELS), nn.ReLU(), shuffled(), nn.ReLU(), dense())

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = functional.relu(self.branch(features).add(features))
            return output

    assert remaining(nn.Sequential(dense(), Bottleneck(), Bottleneck())) == []


class Concatenation(nn.Module):
    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.first = dense()
        self.parts = nn.ModuleList([shuffled(), shuffled(), dense()])
        self.norm = nn.BatchNorm2d(4 * CHANNELS)
        self.after = after

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.first(images)
        features = [part(first) for part in self.parts]
        output: torch.Tensor = self.after(functional.relu(self.norm(torch.cat([images, *features], dim=1))))
        return output


def test_each_part_of_a_concatenation_keeps_its_own_order() -> None:
    # The two parts read one tensor, each in an order of its own. The images come as they are.
    assert len(remaining(Concatenation(dense(4 * CHANNELS)))) == 1


def test_a_grouped_layer_after_a_concatenation_gathers_once() -> None:
    model = Concatenation(nn.Sequential(shuffled(4 * CHANNELS, CHANNELS), dense()))
    assert remaining(model)[1:] == [("after.0", "input")]


@pytest.mark.parametrize(
    "flatten",
    [
        lambda features: features.flatten(1),
        lambda features: torch.flatten(features, start_dim=1),
        lambda features: features.view(features.size(0), -1),
        lambda features: features.reshape((features.shape[0], -1)),
        nn.Flatten(),
    ],
)
def test_the_classifier_takes_in_the_order_of_what_is_flattened(
    flatten: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(dense(), shuffled(), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
            self.flatten = flatten
            self.head = nn.Sequential(nn.Dropout(), nn.Linear(4 * CHANNELS, 10))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.flatten(self.features(images)))
            return scores

    assert remaining(Classifier()) == []


def test_flattening_what_is_flat_already_changes_nothing() -> None:
    features = nn.Sequential(dense(), shuffled(), nn.AdaptiveAvgPool2d(2))
    assert remaining(nn.Sequential(features, nn.Flatten(), nn.Flatten(), nn.Linear(4 * CHANNELS, 5))) == []


def test_the_mean_over_positions_keeps_the_order() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(dense(), shuffled())
            self.head = nn.Linear(CHANNELS, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.features(images).mean([-1, 2]))
            return scores

    assert remaining(Classifier()) == []


def test_a_batch_that_is_squeezed_away_leaves_another_axis_where_the_channels_were() -> None:
    class Squeezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = shuffled()
            self.head = nn.Linear(8, 5)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.layer(images).squeeze(0).mean(2))
            return scores

    model, image = randomised(Squeezing()), IMAGES[:1]
    folded = ss.fold(model, image)
    assert ss.fold_report(folded).untraced_reason == ""
    with torch.no_grad():
        torch.testing.assert_close(folded(image), model(image), rtol=1e-4, atol=1e-5)


def test_grouped_linear_layers_are_absorbed_too() -> None:
    grouped = ShuffledGroupLinear(4 * CHANNELS, 32, groups=GROUPS)
    grouped.in_perm.copy_(torch.randperm(4 * CHANNELS))
    grouped.out_inverse.copy_(torch.randperm(32))
    head = nn.Sequential(nn.Linear(CHANNELS, 4 * CHANNELS), nn.ReLU(), grouped, nn.BatchNorm1d(32), nn.Linear(32, 5))
    folded = folded_equal(head, torch.randn(4, CHANNELS))
    assert ss.fold_report(folded).gathers == ()
    assert [type(module) for module in folded.children()] == [nn.Linear, nn.ReLU, GroupLinear, nn.Linear]
    # Channels that became runs of positions: the groups cut across them, so that a gather has to stay.
    images = nn.Sequential(dense(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), grouped, nn.Linear(32, 5))
    assert remaining(images) == [("3", "input")]


def test_pooling_over_the_channels_themselves_gets_the_natural_order() -> None:
    grouped = ShuffledGroupLinear(CHANNELS, CHANNELS, groups=GROUPS)
    grouped.out_inverse.copy_(torch.randperm(CHANNELS))
    model = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), grouped, nn.MaxPool1d(2), nn.Linear(CHANNELS // 2, 4))
    assert remaining(model, torch.randn(4, CHANNELS)) == [("1", "output")]


def test_a_linear_layer_over_another_axis_leaves_channels_in_natural_order() -> None:
    assert remaining(nn.Sequential(dense(), shuffled(), nn.Linear(8, 8))) == [("1", "output")]


def test_a_layer_that_is_called_twice_is_reordered_for_each_call() -> None:
    layer, norm = shuffled(), nn.BatchNorm2d(CHANNELS)
    model = between_dense(layer, norm, nn.ReLU(), layer, norm, nn.ReLU(), layer)
    assert len(remaining(model)) == 2


def test_weights_that_are_also_read_directly_stay_as_they_are() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.grouped, self.last = dense(), shuffled(), dense()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            features = self.last(self.grouped(self.first(images)))
            output: torch.Tensor = functional.conv2d(features, self.last.weight, self.first.bias)
            return output

    assert remaining(Tied()) == []


def test_a_layer_with_a_hook_keeps_its_shuffles_and_is_reported() -> None:
    model = between_dense(shuffled(), shuffled())
    model[1].register_forward_hook(lambda module, inputs, outputs: outputs.flip(1))
    folded = ss.fold(randomised(model), IMAGES)
    with torch.no_grad():
        torch.testing.assert_close(folded(IMAGES), model(IMAGES))
    sides = [(gather.layer, gather.side) for gather in ss.fold_report(folded).gathers]
    assert sides == [("1", "input"), ("1", "output"), ("2", "input")]


def test_a_layer_with_a_hook_after_one_that_gathers_keeps_its_shuffles_and_is_reported() -> None:
    model = between_dense(shuffled(), shuffled(), shuffled())
    model[2].register_forward_hook(lambda module, inputs, outputs: outputs.flip(1))
    folded = ss.fold(randomised(model), IMAGES)
    with torch.no_grad():
        torch.testing.assert_close(folded(IMAGES), model(IMAGES))
    report = ss.fold_report(folded)
    sides = [(gather.layer, gather.side) for gather in report.gathers]
    assert (report.untraced_reason, sides) == (
        "",
        [("1", "output"), ("2", "input"), ("2", "output"), ("3", "input")],
    )
    assert len({gather.nbytes for gather in report.gathers}) == 1


def test_what_happens_before_a_layer_or_a_norm_happens_in_the_graph_too() -> None:
    def doubled_by_halves(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        first, second = inputs[0].chunk(2, dim=1)
        return (torch.cat([2 * first, second], dim=1),)

    model = nn.Sequential(dense(), nn.BatchNorm2d(CHANNELS), nn.ReLU(), shuffled())
    for place in (1, 3):
        model[place].register_forward_pre_hook(doubled_by_halves)
    folded = ss.fold(randomised(model), IMAGES)
    report = ss.fold_report(folded)
    assert (report.untraced_reason, report.num_kept_batch_norms) == ("", 1)
    assert [(gather.layer, gather.side) for gather in report.gathers] == [("3", "input"), ("3", "output")]
    with torch.no_grad():
        torch.testing.assert_close(folded(IMAGES), model(IMAGES))


class ControlFlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.norm = shuffled(), nn.BatchNorm2d(CHANNELS)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.norm(self.grouped(images))
        return features if features.mean() > 0 else -features


def test_a_network_that_cannot_be_traced_keeps_its_function_and_names_its_gathers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = randomised(ControlFlow())
    with caplog.at_level(logging.WARNING):
        folded = ss.fold(model, IMAGES)
    report = ss.fold_report(folded)
    assert "TraceError" in report.untraced_reason
    assert "TraceError" in caplog.text
    assert [(gather.layer, gather.side) for gather in report.gathers] == [("grouped", "input"), ("grouped", "output")]
    assert report.gathers[0].nbytes == IMAGES.nbytes
    assert report.num_kept_batch_norms == 1
    for images in (IMAGES, -IMAGES):
        torch.testing.assert_close(folded(images), model(images))
    assert "not traced" in str(report)


def test_a_graph_that_computes_something_else_is_not_used() -> None:
    class Doubling(nn.Module):
        """Does something else while it is traced."""

        def __init__(self) -> None:
            super().__init__()
            self.grouped = shuffled()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.grouped(images) * (2 if isinstance(images, fx.Proxy) else 1)
            return output

    model = Doubling().eval()
    folded = ss.fold(model, IMAGES)
    assert "not known to compute the same" in ss.fold_report(folded).untraced_reason
    torch.testing.assert_close(folded(IMAGES), model(IMAGES))


def test_the_model_stays_as_it_is() -> None:
    model = between_dense(shuffled(), nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True)).train()
    images, before = IMAGES.clone(), copy.deepcopy(model.state_dict())
    folded = ss.fold(model, images)
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in folded.modules())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(images, IMAGES, rtol=0, atol=0)
    shared = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert shared.isdisjoint(tensor.data_ptr() for tensor in folded.state_dict().values())


def test_a_masked_network_folds_to_its_dense_form() -> None:
    model = between_dense(nn.Conv2d(CHANNELS, CHANNELS, 3))
    generator = np.random.default_rng(0)
    layer = ss.LayerPlan(
        group_level=3,
        out_perm=generator.permutation(CHANNELS),
        in_perm=generator.permutation(CHANNELS),
        weight_shape=(CHANNELS, CHANNELS, 3, 3),
    )
    ss.mask_(model, ss.GroupingPlan({"1": layer}))
    assert {type(module) for module in folded_equal(model).children()} == {nn.Conv2d}
    assert type(model[1]) is not nn.Conv2d


@pytest.mark.parametrize("size", [8, 9])
def test_only_the_positions_that_a_strided_1x1_convolution_looks_at_are_gathered(size: int) -> None:
    strided = shuffled(kernel_size=1)
    strided.stride = (2, 3)
    images = torch.randn(2, CHANNELS, size, size)
    (gather,) = ss.fold_report(folded_equal(nn.Sequential(strided, dense()), images)).gathers
    assert gather.nbytes == images[:, :, ::2, ::3].numel() * images.itemsize


def test_a_padded_strided_convolution_sees_all_positions() -> None:
    for strided in (shuffled(kernel_size=1), shuffled()):
        strided.stride = strided.padding = (2, 2)
        (gather,) = ss.fold_report(folded_equal(nn.Sequential(strided, dense()))).gathers
        assert gather.nbytes == IMAGES.nbytes


def test_one_layer_alone_is_a_network() -> None:
    assert remaining(shuffled()) == [("0", "input"), ("0", "output")]


@pytest.mark.parametrize("widen_groups_below", [1, 4])
def test_a_linear_layer_without_inputs_folds_like_others(widen_groups_below: int) -> None:
    empty = nn.Linear(1, CHANNELS)
    empty.weight, empty.in_features = nn.Parameter(torch.empty(CHANNELS, 0)), 0
    grouped = ShuffledGroupLinear(CHANNELS, CHANNELS, groups=GROUPS)
    grouped.in_perm.copy_(torch.randperm(CHANNELS))
    model, rows = nn.Sequential(empty, grouped, nn.Linear(CHANNELS, 5)).eval(), torch.empty(3, 0)
    folded = ss.fold(model, rows, widen_groups_below=widen_groups_below)
    report = ss.fold_report(folded)
    assert (report.untraced_reason, report.gathers) == ("", ())
    torch.testing.assert_close(folded(rows), model(rows).detach())


def test_channels_last_and_half_precision_stay() -> None:
    model = randomised(between_dense(shuffled(), nn.BatchNorm2d(CHANNELS), shuffled()))
    channels_last = model.to(memory_format=torch.channels_last)
    folded = ss.fold(channels_last, IMAGES.to(memory_format=torch.channels_last))
    assert folded.get_parameter("1.weight").is_contiguous(memory_format=torch.channels_last)
    half = ss.fold(model.bfloat16(), IMAGES.bfloat16())
    assert ss.fold_report(half).untraced_reason == ""
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_the_graph_exports_and_its_copies_keep_the_report() -> None:
    folded = folded_equal(between_dense(shuffled(), nn.ReLU(), shuffled()))
    program = torch.export.export(folded, (IMAGES,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(IMAGES[:2]), folded(IMAGES[:2]))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("index_select" in name for name in names) == 1
    copied = copy.deepcopy(folded)
    assert ss.fold_report(copied) == ss.fold_report(folded)
    torch.testing.assert_close(copied(IMAGES), folded(IMAGES))


def test_the_report_is_a_table_with_a_total() -> None:
    folded = folded_equal(nn.Sequential(dense(), shuffled()))
    lines = str(ss.fold_report(folded)).splitlines()
    assert lines[0].split() == ["layer", "gather", "channels", "runs", "bytes"]
    assert lines[2].split()[:3] == ["1", "output", "16"]
    assert lines[3] == f"1 gather remains, {IMAGES.nbytes:,} bytes"


def test_a_graph_of_someone_else_has_no_report() -> None:
    with pytest.raises(ValueError, match="no report of fold"):
        ss.fold_report(fx.symbolic_trace(nn.Sequential(dense())))


class ByKeyword(nn.Module):
    """Calls its layers by keyword."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            images = layer(input=images)
        return images


def test_calls_by_keyword_keep_their_shuffles_and_norms() -> None:
    model = randomised(ByKeyword(dense(), shuffled(), nn.BatchNorm2d(CHANNELS), nn.ReLU(), dense()))
    folded = ss.fold(model, IMAGES)
    assert torch.allclose(folded(IMAGES), model(IMAGES), atol=1e-4)
    report = ss.fold_report(folded)
    assert (len(report.gathers), report.num_kept_batch_norms, report.untraced_reason) == (2, 1, "")
    assert ss.summary(folded, IMAGES).gathers == report.gathers


def test_a_hook_sees_a_call_by_keyword_as_it_was() -> None:
    grouped = shuffled()
    # Without positional arguments there is nothing to change.
    grouped.register_forward_pre_hook(lambda module, arguments: tuple(2 * argument for argument in arguments))
    model = randomised(ByKeyword(dense(), grouped, dense()))
    folded = ss.fold(model, IMAGES)
    assert ss.fold_report(folded).untraced_reason == ""
    torch.testing.assert_close(folded(IMAGES), model(IMAGES).detach(), rtol=1e-4, atol=1e-5)
