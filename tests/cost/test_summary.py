import copy
import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from compiled_networks import scripted, traced
from torch import nn
from torch.nn.utils import parametrizations
from torch_warnings import SCRIPTING_WARNS

from strucspars.convert.conversion import convert_, model_plan
from strucspars.core.hierarchy import max_group_level
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.cost.counting import BeforeAfter, count_macs
from strucspars.cost.summary import Summary, summary
from strucspars.nn.groupable import select_layers
from strucspars.nn.layers import group_module_, mask_module_

IMAGE = torch.zeros(1, 3, 8, 8)


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.Conv2d(16, 8, 1, bias=False),
        nn.Flatten(),
        nn.Linear(8 * 36, 10),
    )


def plan_of(model: nn.Module, names: list[str], level: int = 3) -> GroupingPlan:
    generator = np.random.default_rng(0)
    layers = {}
    for name in names:
        weight = model.get_submodule(name).weight
        assert isinstance(weight, nn.Parameter)
        out_channels, in_channels = weight.shape[:2]
        layers[name] = LayerPlan(
            group_level=min(level, max_group_level(out_channels, in_channels)),
            out_perm=generator.permutation(out_channels),
            in_perm=generator.permutation(in_channels),
            weight_shape=tuple(weight.shape),
        )
    return GroupingPlan(layers)


def converted(model: nn.Module, plan: GroupingPlan) -> nn.Module:
    model = copy.deepcopy(model)
    for name, layer in plan.layers.items():
        group_module_(model.get_submodule(name), layer)
    return model


def without_what_conversion_changes(report: Summary) -> Summary:
    rows = tuple(
        replace(row, layer_type=row.layer_type.replace("ShuffledGroup", ""), kept_norm=None) for row in report.rows
    )
    return replace(report, rows=rows)


def test_a_dense_model_is_the_same_before_and_after() -> None:
    model = small_network()
    report = summary(model, IMAGE)
    assert report.params == BeforeAfter(*[sum(parameter.numel() for parameter in model.parameters())] * 2)
    assert all(row.params.removed_fraction == 0 == row.groups.removed_fraction for row in report.rows)
    assert [row.name for row in report.rows if not row.note] == ["2", "4"]
    assert report.rows[0].note == "8 x 3 channels: an odd width has one group only"
    assert report.rows[2].note == "depthwise: nothing to divide"
    assert report.rows[4].note == "Linear is not among the types to group"
    assert report.rows[2].weight_shape == (16, 1, 3, 3)
    assert report.rows[2].groups == BeforeAfter(16, 16)
    assert all(row.kept_norm is None for row in report.rows)


@pytest.mark.parametrize("names", [["2"], ["2", "4", "6"]])
def test_a_planned_model_is_described_as_the_converted_one(names: list[str]) -> None:
    model = small_network()
    plan = plan_of(model, names)
    planned, done = summary(model, IMAGE, plan), summary(converted(model, plan), IMAGE)
    assert without_what_conversion_changes(planned) == without_what_conversion_changes(done)
    assert planned.params.removed_fraction > 0
    assert done.params.after == sum(parameter.numel() for parameter in converted(model, plan).parameters())
    assert [row.name for row in done.rows if row.groups.after != row.groups.before] == names


def test_a_planned_resnet18_is_described_as_the_converted_one_with_true_totals() -> None:
    model = torchvision.models.resnet18(weights=None)
    image = torch.zeros(1, 3, 64, 64)
    plan = plan_of(model, [layer.name for layer in select_layers(model).layers], level=4)
    grouped = converted(model, plan)
    planned, done = summary(model, image, plan), summary(grouped, image)
    assert without_what_conversion_changes(planned) == without_what_conversion_changes(done)
    dense_count, grouped_count = count_macs(model, image), count_macs(grouped, image)
    assert done.params == BeforeAfter(dense_count.params, grouped_count.params)
    assert done.macs == BeforeAfter(dense_count.macs, grouped_count.macs)
    assert done.paper_flops == BeforeAfter(dense_count.paper_flops, grouped_count.paper_flops)
    assert max(len(line) for line in str(done).splitlines()) <= 120


def test_a_plan_on_a_half_converted_model_describes_the_other_half() -> None:
    model = small_network()
    whole = plan_of(model, ["2", "4"])
    half = converted(model, GroupingPlan({"2": whole.layers["2"]}))
    half_way = summary(half, IMAGE, whole)
    assert without_what_conversion_changes(half_way) == without_what_conversion_changes(summary(model, IMAGE, whole))
    assert [row.kept_norm is None for row in half_way.rows] == [True, True, True, False, True]


def test_kept_norm_is_the_fraction_that_masking_leaves() -> None:
    model = small_network()
    plan = plan_of(model, ["2", "4"])
    before = {row.name: row.kept_norm for row in summary(model, plan=plan).rows}
    for name, layer in plan.layers.items():
        module = model.get_submodule(name)
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        norm = weight.detach().abs().sum().item()
        mask_module_(module, layer)
        assert before[name] == pytest.approx(weight.detach().abs().sum().item() / norm, rel=1e-5)
    masked = summary(model, plan=plan)
    assert [row.kept_norm for row in masked.rows] == [None, 1.0, None, 1.0, None]
    assert masked.rows[1].params == BeforeAfter(16 * 8 * 9 + 16, 16 * 8 * 9 // 4 + 16)


def test_without_inputs_there_are_neither_macs_nor_gathers() -> None:
    model = small_network()
    report = summary(converted(model, plan_of(model, ["2"])))
    assert report.macs is report.paper_flops is None
    assert report.gathers is None
    assert all(row.macs is None for row in report.rows)
    assert "MACs" not in str(report)
    assert "gathers" not in str(report)


def test_an_all_zero_layer_is_flagged_dense_and_converted() -> None:
    model = small_network()
    plan = plan_of(model, ["2", "4"])
    for name in ("0", "2"):
        nn.init.zeros_(model.get_parameter(f"{name}.weight"))
    notes = [row.note for row in summary(model, plan=plan).rows]
    assert notes[:2] == ["8 x 3 channels: an odd width has one group only; all zero", "all zero"]
    assert notes[3] == ""
    assert [row.note for row in summary(converted(model, plan)).rows] == notes
    assert summary(model, plan=plan).rows[1].kept_norm == 1.0


def test_a_shared_module_has_one_row() -> None:
    layer = nn.Conv2d(4, 4, 1, bias=False)
    report = summary(nn.Sequential(layer, layer), torch.zeros(1, 4, 3, 3))
    assert [(row.name, row.params.before, row.macs) for row in report.rows] == [
        ("0", 16, BeforeAfter(2 * 16 * 9, 2 * 16 * 9))
    ]
    assert report.params == BeforeAfter(16, 16)


def test_a_layer_that_is_not_called_says_so() -> None:
    class Attention(nn.MultiheadAttention):
        def forward(self, features: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # one input
            return super().forward(features, features, features)[0]

    (row,) = summary(Attention(8, 2), torch.zeros(3, 1, 8)).rows
    assert row.macs == BeforeAfter(0, 0)
    assert "not called as a module in this pass: no MACs counted" in row.note


def test_the_table_names_rows_notes_and_totals() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8))
    nn.init.ones_(model.get_parameter("1.weight"))
    text = str(summary(model, IMAGE, plan_of(model, ["1"], level=2)))
    assert text == "\n".join(
        [
            "layer  type     weight  groups      params            MACs  kept norm  gathers  note",
            "------------------------------------------------------------------------------------",
            "0      Conv2d  8x3x1x1       1          32           1,536                       [1]",
            "1      Conv2d  8x8x3x3  1 -> 2  576 -> 288  20.7K -> 10.4K      0.500        2",
            "",
            "[1] 8 x 3 channels: an odd width has one group only",
            "",
            "params          624 ->    336  (46.2% removed)",
            "MACs         22,272 -> 11,904  (46.6% removed)",
            "paper FLOPs  23,424 -> 13,056  (44.3% removed)",
            "gathers      2, 3,200 bytes",
        ]
    )


@pytest.mark.parametrize(
    ("outputs", "inputs", "shown"),
    [
        (99, 101, "9,999"),
        (100, 100, "10K"),
        (97, 1031, "100K"),
        (980, 1019, "999K"),
        (980, 1020, "1M"),
        (1234, 10_000, "12.3M"),
        (40_000, 40_000, "1.6G"),
        (1_000_000, 2_000_000, "2T"),
    ],
)
def test_counts_are_exact_below_ten_thousand_and_then_have_three_digits(outputs: int, inputs: int, shown: str) -> None:
    with torch.device("meta"):
        layer = nn.Linear(inputs, outputs, bias=False)
    assert str(summary(layer)).splitlines()[2].split()[4] == shown


def test_totals_stand_under_each_other() -> None:
    model = nn.Linear(128, 128, bias=False)
    lines = str(summary(model, torch.zeros(4, 128), plan_of(model, [""], level=2))).splitlines()
    assert lines[-4:-1] == [
        "params       16,384 ->  8,192  (50.0% removed)",
        "MACs         65,536 -> 32,768  (50.0% removed)",
        "paper FLOPs  65,536 -> 32,768  (50.0% removed)",
    ]
    assert str(summary(model, plan=plan_of(model, [""], level=2))).endswith("params  16,384 ->  8,192  (50.0% removed)")


def test_a_long_note_goes_on_beside_its_number() -> None:
    report = summary(nn.Linear(4, 2))
    (row,) = report.rows
    lines = str(replace(report, rows=(replace(row, note="no group " * 20),))).splitlines()
    assert lines[4].startswith("[1] no group")
    assert lines[5].startswith("    no group")
    assert max(map(len, lines)) <= 120


def test_long_names_are_shortened_in_the_middle_to_fit_120_columns() -> None:
    model: nn.Module = nn.Conv2d(8, 8, 3)
    for _ in range(4):
        model = nn.ModuleDict({"a_block_with_quite_a_long_name": model})
    plan = plan_of(model, [".".join(["a_block_with_quite_a_long_name"] * 4)])
    lines = str(summary(model, plan=plan)).splitlines()
    assert {len(line) for line in lines[:3]} == {120}
    assert lines[2].startswith("a_block_with")
    assert "..." in lines[2]


def test_a_model_without_layers_has_a_summary() -> None:
    report = summary(nn.ReLU(), torch.zeros(1))
    assert str(report).splitlines()[0] == "no convolutions or linear layers"
    assert report.params.removed_fraction == 0


def test_a_model_on_the_meta_device_has_a_summary_without_values() -> None:
    with torch.device("meta"):
        model, image = small_network(), torch.empty(1, 3, 8, 8)
    report = summary(model, image, plan_of(model, ["2"]))
    assert report.macs == summary(small_network(), IMAGE, plan_of(model, ["2"])).macs
    assert report.rows[1].kept_norm is None
    assert "all zero" not in str(report)


def test_a_planned_layer_with_nan_is_named() -> None:
    model = small_network()
    plan = plan_of(model, ["4"])
    nn.init.constant_(model.get_parameter("4.weight"), float("nan"))
    with pytest.raises(ValueError, match=r"layer '4': .*NaN"):
        summary(model, plan=plan)


def test_inputs_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"example_inputs must be a tensor or a tuple .* got list"):
        summary(small_network(), [IMAGE])  # type: ignore[arg-type]  # the mistake


def test_a_plan_for_an_unknown_layer_is_refused() -> None:
    model = small_network()
    (layer,) = plan_of(model, ["2"]).layers.values()
    with pytest.raises(ValueError, match="layer 'conv' of the plan is not in the network"):
        summary(model, plan=GroupingPlan({"conv": layer}))


def test_a_quantised_layer_has_a_row_with_what_is_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own: such layers will be gone some day
        quantized = pytest.importorskip("torch.ao.nn.quantized", reason="this PyTorch has no quantised layers")
        dynamic = importlib.import_module("torch.ao.nn.quantized.dynamic")
        packed = quantized.Conv2d(8, 8, 3, groups=2)
        model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), dynamic.Linear(8, 4), packed)
    model.forward = lambda images: model[:4](images)  # type: ignore[method-assign]  # the last needs quantised input
    report = summary(model, IMAGE)
    assert [row.name for row in report.rows] == ["0", "3", "4"]
    linear, convolution = report.rows[1:]
    assert (linear.params, linear.macs, linear.weight_shape) == (BeforeAfter(0, 0), None, ())
    assert linear.note.startswith("Linear is quantised: group the network first")
    assert "its packed weight is counted neither as parameters nor in MACs" in linear.note
    assert convolution.groups == BeforeAfter(2, 2)
    assert report.params == BeforeAfter(32, 32)
    assert report.macs == report.rows[0].macs
    assert "Conv2d is quantised" in str(report)


@SCRIPTING_WARNS
@pytest.mark.parametrize("compiled", [scripted, traced])
def test_a_scripted_layer_has_a_row_with_its_parameters_and_no_macs(
    compiled: Callable[[nn.Module, torch.Tensor], nn.Module],
) -> None:
    part = compiled(nn.Sequential(nn.Conv2d(8, 8, 1)), torch.zeros(1, 8, 8, 8))
    model = nn.Sequential(nn.Conv2d(3, 8, 1), part)
    report = summary(model, IMAGE)
    first, opaque = report.rows
    assert (opaque.name, opaque.weight_shape, opaque.macs) == ("1.0", (), None)
    assert opaque.params == BeforeAfter(72, 72)
    assert opaque.note == "it is scripted or traced: group the network first, then script it; no MACs counted"
    assert report.params == BeforeAfter(32 + 72, 32 + 72)
    assert report.macs == first.macs
    assert count_macs(model, IMAGE).macs == 3 * 8 * 64


class OtherTensor(torch.Tensor):
    """A tensor of another library that can do next to nothing."""

    def any(self, *_: object) -> torch.Tensor:
        raise NotImplementedError


def test_a_weight_that_is_no_plain_tensor_does_not_disturb_the_summary() -> None:
    layer = nn.Conv2d(4, 8, 1, bias=False)
    layer.weight = nn.Parameter(torch.randn(8, 4, 1, 1).as_subclass(OtherTensor))
    (row,) = summary(layer).rows
    assert (row.params, row.note) == (BeforeAfter(32, 32), "its weight is a OtherTensor, not a plain tensor")


def test_a_parametrisation_of_a_grouped_layer_is_refused_by_the_layers_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.Conv2d(8, 8, 1)))
    convert_(model, plan_of(model, ["1.0"], level=2))
    parametrizations.spectral_norm(model.get_submodule("1.0"))
    for read in (summary, count_macs):
        with pytest.raises(ValueError, match=r"layer '1\.0' has no plain weight: .*, or remove the parametrisation"):
            read(model, IMAGE)
    with pytest.raises(ValueError, match=r"layer '1\.0' has no plain weight"):
        model_plan(model)
