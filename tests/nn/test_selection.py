import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compiled_networks import scripted, traced
from timm.models.eva import EvaAttention
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch_warnings import SCRIPTING_WARNS
from torchvision.models.swin_transformer import ShiftedWindowAttention

from strucspars.nn.groupable import LayerRules, Selection, select_layers
from strucspars.nn.layers import ShuffledGroupConv2d


class Zoo(nn.Module):
    """One of each kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.plain = nn.Conv2d(16, 32, 3)
        self.wide = nn.Conv2d(32, 64, 1)
        self.odd = nn.Conv2d(64, 7, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.grouped = nn.Conv2d(16, 16, 3, groups=4)
        self.transposed = nn.ConvTranspose2d(16, 16, 3)
        self.lazy = nn.LazyConv2d(16, 3)
        self.normed = parametrizations.weight_norm(nn.Conv2d(16, 16, 3))
        self.done = ShuffledGroupConv2d(16, 16, 3, groups=2)
        self.signal = nn.Conv1d(16, 16, 3)
        self.volume = nn.Conv3d(16, 16, 3)
        self.head = nn.Linear(64, 10)


def reason(selection: Selection, name: str) -> str:
    (skipped,) = [layer for layer in selection.skipped if layer.name == name]
    return skipped.reason


def names(selection: Selection) -> list[str]:
    return [layer.name for layer in selection.layers]


def test_plain_convolutions_are_selected_and_all_others_get_a_reason() -> None:
    selection = select_layers(Zoo())
    assert names(selection) == ["plain", "wide"]
    reasons = {
        "stem": "16 x 3 channels: an odd width has one group only",
        "odd": "7 x 64 channels: an odd width",
        "depthwise": "depthwise",
        "grouped": "4 groups already",
        "transposed": "ConvTranspose2d is not among the types",
        "lazy": "lazy",
        "normed": "parametrised",
        "done": "grouped already by strucspars",
        "signal": "Conv1d is not among the types",
        "head": "Linear is not among the types",
    }
    for name, expected in reasons.items():
        assert expected in reason(selection, name), name


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.Conv2d(8, 32, 3, groups=8), "depthwise: nothing to divide"),
        (nn.Conv2d(32, 8, 3, groups=8), "it has 8 groups already"),
    ],
)
def test_a_layer_is_depthwise_where_every_output_sees_one_input(layer: nn.Module, told: str) -> None:
    assert reason(select_layers(nn.Sequential(layer)), "0") == told


def test_other_types_are_selected_by_naming_them() -> None:
    selection = select_layers(Zoo(), LayerRules(layer_types=("Conv1d", "Conv3d", "Linear")))
    assert names(selection) == ["signal", "volume", "head"]


def test_names_and_a_function_choose_layers() -> None:
    assert names(select_layers(Zoo(), LayerRules(include=("w*",)))) == ["wide"]
    assert names(select_layers(Zoo(), LayerRules(exclude=("w?de",)))) == ["plain"]
    selection = select_layers(Zoo(), filter_fn=lambda module, name: isinstance(module, nn.Conv2d) and name != "plain")
    assert names(selection) == ["wide"]
    assert reason(selection, "plain") == "filtered out"


def test_levels_are_limited_by_name_and_by_width() -> None:
    def largest(rules: LayerRules) -> dict[str, int]:
        return {layer.name: layer.largest_level for layer in select_layers(Zoo(), rules).layers}

    assert largest(LayerRules()) == {"plain": 5, "wide": 6}
    assert largest(LayerRules(largest_levels={"*": 9})) == {"plain": 5, "wide": 6}
    assert largest(LayerRules(largest_levels={"*": 4, "plain": 2})) == {"plain": 2, "wide": 4}
    assert largest(LayerRules(min_channels_per_group=8)) == {"plain": 2, "wide": 3}
    assert largest(LayerRules(min_channels_per_group=8, largest_levels={"wide": 2})) == {"plain": 2, "wide": 2}
    assert largest(LayerRules(min_channels_per_group=32)) == {}
    fixed = select_layers(Zoo(), LayerRules(fixed_levels={"plain": 3})).layers[0]
    assert (fixed.fixed_level, fixed.largest_level) == (3, 3)


def test_a_layer_that_stays_whole_for_its_width_says_so() -> None:
    too_wide = select_layers(Zoo(), LayerRules(min_channels_per_group=32))
    assert reason(too_wide, "wide") == "64 x 32 channels: min_channels_per_group=32 allows one group only"
    by_name = select_layers(Zoo(), LayerRules(largest_levels={"wide": 1}))
    assert reason(by_name, "wide") == "64 x 32 channels: the rules allow one group only"


def test_a_fixed_level_may_not_make_groups_too_narrow() -> None:
    rules = LayerRules(fixed_levels={"wide": 3}, min_channels_per_group=8)
    assert [layer.fixed_level for layer in select_layers(Zoo(), rules).layers if layer.name == "wide"] == [3]
    with pytest.raises(
        ValueError, match=r"at most 2 groups of at least 16 channels\), got 3; lower it or min_channels"
    ):
        select_layers(Zoo(), replace(rules, min_channels_per_group=16))
    whole = select_layers(Zoo(), LayerRules(fixed_levels={"wide": 1}, min_channels_per_group=512))
    assert [(layer.name, layer.fixed_level) for layer in whole.layers] == [("wide", 1)]


def test_a_shared_module_appears_once_and_a_shared_weight_is_left_alone() -> None:
    shared, twin, other = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    twin.weight = other.weight
    selection = select_layers(nn.Sequential(shared, shared, twin, other))
    assert names(selection) == ["0"]
    assert reason(selection, "2") == "its weight is shared with '3'"


def test_a_subclass_is_left_alone() -> None:
    class Standardised(nn.Conv2d):
        pass

    class Simple(nn.Conv3d):
        pass

    selection = select_layers(nn.Sequential(Standardised(4, 4, 1), Simple(4, 4, 1)))
    told = "which may compute something else: only nn.Conv{0}d itself is grouped"
    assert reason(selection, "0") == f"Standardised is a subclass of nn.Conv2d, {told.format(2)}"
    # Not one that the types to group could hold, either.
    assert reason(selection, "1") == f"Simple is a subclass of nn.Conv3d, {told.format(3)}"
    with pytest.raises(ValueError, match=r"only nn\.Conv2d itself is grouped$"):
        selection.check_not_empty()


def test_a_weight_recomputed_by_a_hook_is_left_alone() -> None:
    layer = nn.Conv2d(4, 4, 1)
    torch.nn.utils.spectral_norm(layer)
    assert "recomputed before every call" in reason(select_layers(nn.Sequential(layer)), "0")


class Doubled(nn.Module):
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


def test_a_parametrised_tensor_is_named() -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(3)))
    parametrizations.spectral_norm(model[0])
    parametrize.register_parametrization(model[1], "bias", Doubled())
    for tensor in ("weight", "bias"):
        parametrize.register_parametrization(model[2], tensor, Doubled())
    assert [skipped.reason for skipped in select_layers(model).skipped] == [
        "its weight is parametrised (weight or spectral norm): remove the parametrisation first",
        "its bias is parametrised: remove the parametrisation first",
        "its weight and bias are parametrised: remove the parametrisation first",
    ]


def test_where_layers_stay_for_their_type_the_option_is_named() -> None:
    model = nn.Sequential(nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(8, 7), nn.ConvTranspose1d(8, 8, 3))
    remedy = r"; layer_types adds types \(sparsify\.layer_types in a recipe, --layer-type of compress\)$"
    with pytest.raises(ValueError, match=f"Conv1d is not among the types to group; .*{remedy}"):
        select_layers(model).check_not_empty()
    assert names(select_layers(model, LayerRules(layer_types=("Conv1d",)))) == ["0"]
    # No type helps a layer that the rules leave out.
    rules = LayerRules(exclude=("*",), layer_types=("Conv1d", "Linear"))
    with pytest.raises(ValueError, match="no layer of the model can be grouped") as refusal:
        select_layers(model, rules).check_not_empty()
    assert "layer_types" not in str(refusal.value)


def test_what_chooses_layers_is_asked_about_the_types_to_group_only() -> None:
    asked = set()

    def choose(module: nn.Module, name: str) -> bool:
        asked.add(type(module))
        return False

    assert names(select_layers(Zoo(), filter_fn=choose)) == []
    assert asked == {nn.Conv2d}


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        (LayerRules(include=("plian",)), "include: 'plian' matches no layer of the model; did you mean 'plain'?"),
        (LayerRules(exclude=("layer9.*",)), r"exclude: 'layer9\.\*' matches no layer"),
        (LayerRules(fixed_levels={"wdie": 2}), "fixed_levels: 'wdie' matches no layer of the model; did you mean"),
        (LayerRules(largest_levels={"wdie": 2}), "largest_levels: 'wdie' matches no layer of the model; did you mean"),
        (LayerRules(fixed_levels={"plain": 9}), r"layer 'plain': fixed level must lie in 1\.\.5 \(at most 16 groups\)"),
    ],
)
def test_a_rule_that_fits_no_layer_is_named(rules: LayerRules, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        select_layers(Zoo(), rules)


def test_a_weight_tied_to_another_kind_of_module_is_left_alone() -> None:
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8)
    head.weight = embedding.weight
    selection = select_layers(nn.Sequential(embedding, head), LayerRules(layer_types=("Linear",)))
    assert reason(selection, "1") == "its weight is shared with '0'"


def test_a_weight_tied_by_its_values_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ConvTranspose2d(4, 8, 1))
    model[1].weight.data = model[0].weight.data
    selection = select_layers(model)
    assert names(selection) == []
    assert reason(selection, "0") == "its weight is shared with '1'"


@pytest.mark.parametrize("packed", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn])
def test_parameters_without_a_place_in_memory_are_tied_to_none(packed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ParameterList([nn.Parameter(packed(torch.eye(2)), False)]))
    assert names(select_layers(model)) == ["0"]


def test_bad_rules_are_named() -> None:
    for option in ("fixed_levels", "largest_levels"):
        with pytest.raises(ValueError, match=rf"{option}\['conv'\] must be a whole number from 1 on, got 0"):
            replace(LayerRules(), **{option: {"conv": 0}})  # type: ignore[arg-type]  # the option varies
    for option in ("include", "exclude"):
        with pytest.raises(ValueError, match=f"{option} must be a sequence of texts, got 'conv'"):
            replace(LayerRules(), **{option: "conv"})  # type: ignore[arg-type]  # the bad value is the point
    with pytest.raises(ValueError, match="layer_types may hold Conv1d, Conv2d, Conv3d, Linear; got"):
        LayerRules(layer_types=("ConvTranspose2d",))
    for width in (0, 1.5, True, "16"):
        with pytest.raises(ValueError, match="min_channels_per_group must be a whole number from 1 on"):
            LayerRules(min_channels_per_group=width)  # type: ignore[arg-type]  # the bad value is the point


def test_numbers_of_numpy_become_plain_ones() -> None:
    number: Any = np.int64(2)
    rules = LayerRules(min_channels_per_group=number, largest_levels={"*": number})
    assert [type(plain) for plain in (rules.min_channels_per_group, rules.largest_levels["*"])] == [int, int]


def quantised(module: str, name: str, *arguments: int) -> nn.Module:
    """A layer of PyTorch's, which warns that it will be gone some day, and is gone on some day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layer: nn.Module = getattr(importlib.import_module(module), name)(*arguments)
        except (ImportError, AttributeError, RuntimeError) as error:
            pytest.skip(f"this PyTorch has no quantised {name}: {error}")
    return layer


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("torch.ao.nn.quantized", "Conv1d", (4, 8, 3)),
        ("torch.ao.nn.quantized", "Conv2d", (4, 8, 3)),
        ("torch.ao.nn.quantized", "Conv3d", (4, 8, 3)),
        ("torch.ao.nn.quantized", "ConvTranspose2d", (4, 8, 3)),
        ("torch.ao.nn.quantized", "Linear", (4, 8)),
        ("torch.ao.nn.quantized.dynamic", "Linear", (4, 8)),
        ("torch.ao.nn.quantized.dynamic", "Conv2d", (4, 8, 3)),
        ("torch.ao.nn.intrinsic.quantized", "ConvReLU2d", (4, 8, 3)),
        ("torch.ao.nn.intrinsic.quantized", "LinearReLU", (4, 8)),
    ],
)
def test_a_quantised_layer_is_listed_with_the_reason(module: str, name: str, arguments: tuple[int, ...]) -> None:
    model = nn.Sequential(quantised(module, name, *arguments), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    selection = select_layers(model)
    assert names(selection) == ["1"]
    assert [layer.name for layer in selection.skipped] == ["0"]
    assert reason(selection, "0") == f"{name} is quantised: group the network first, then quantise it"


def test_quantised_layers_without_channels_are_not_listed() -> None:
    model = nn.Sequential(quantised("torch.ao.nn.quantized", "BatchNorm2d", 8), nn.ReLU())
    assert select_layers(model) == Selection((), ())


def test_a_layer_made_for_quantisation_aware_training_is_a_subclass() -> None:
    quantization = importlib.import_module("torch.ao.quantization")
    qconfig = quantization.get_default_qat_qconfig("fbgemm")
    layer = importlib.import_module("torch.ao.nn.qat").Conv2d(4, 8, 3, qconfig=qconfig)
    assert reason(select_layers(nn.Sequential(layer)), "0").startswith("Conv2d is a subclass of nn.Conv2d, which may")


class OtherTensor(torch.Tensor):
    """Stands for the weights of quantisation libraries, which are tensors of their own classes."""


def test_a_weight_that_is_no_plain_tensor_is_left_alone() -> None:
    layer = nn.Linear(4, 8)
    layer.weight = nn.Parameter(torch.randn(8, 4).as_subclass(OtherTensor))
    selection = select_layers(nn.Sequential(layer), LayerRules(layer_types=("Linear",)))
    assert reason(selection, "0") == "its weight is a OtherTensor, not a plain tensor"


def test_weights_that_a_transformer_reads_itself_are_left_alone() -> None:
    class OwnLayer(nn.TransformerEncoderLayer):
        pass

    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
            "own": OwnLayer(8, 2, 16),
            "decoder": nn.TransformerDecoderLayer(8, 2, 16),
            "attention": nn.MultiheadAttention(8, 2),
        }
    )
    model["attention"].out_proj = nn.Linear(8, 8)
    selection = select_layers(model, LayerRules(layer_types=("Linear",)))
    assert names(selection) == ["decoder.linear1", "decoder.linear2"]
    for layer in ("linear1", "linear2"):
        told = "TransformerEncoderLayer computes with its weight itself"
        assert reason(selection, f"encoder.layers.1.{layer}") == told
        assert reason(selection, f"own.{layer}").startswith("OwnLayer computes with its weight")
    assert "is a subclass" in reason(selection, "encoder.layers.0.self_attn.out_proj")
    assert reason(selection, "attention.out_proj").startswith("MultiheadAttention computes with its weight")


def test_attentions_of_torchvision_and_timm_that_read_their_weights_keep_them() -> None:
    rules = LayerRules(layer_types=("Linear",))
    swin = ShiftedWindowAttention(8, [4, 4], [0, 0], 2)
    assert names(select_layers(swin, rules)) == []
    # Where it has no bias it calls its layer, but nobody knows that from outside.
    assert names(select_layers(EvaAttention(8, num_heads=2, qk_norm=False, scale_norm=False), rules)) == ["proj"]


@SCRIPTING_WARNS
@pytest.mark.parametrize("compiled", [scripted, traced])
def test_layers_of_scripted_and_traced_networks_are_listed_with_the_reason(
    compiled: Callable[[nn.Module, torch.Tensor], nn.Module],
) -> None:
    told = "it is scripted or traced: group the network first, then script it"
    network = compiled(nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU()), torch.zeros(1, 4, 3, 3))
    selection = select_layers(network, LayerRules(include=("0",)))
    assert names(selection) == []
    assert {skipped.name: skipped.reason for skipped in selection.skipped} == {"": told, "0": told}
    part = select_layers(nn.Sequential(nn.Conv2d(4, 4, 1), network))
    assert names(part) == ["0"]
    assert {skipped.name: skipped.reason for skipped in part.skipped} == {"1.0": told}


@SCRIPTING_WARNS
def test_a_frozen_network_has_no_layers_left_and_is_named_itself() -> None:
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Conv2d(4, 8, 1)).eval()))
    with pytest.raises(ValueError, match="can be grouped: it is scripted or traced: group the network first"):
        select_layers(frozen).check_not_empty()
