"""Which networks of torchvision and timm can be grouped, how far, and whether their function survives it.

    python benchmarks/compatibility.py                  # everything, into docs/compatibility.md and results/
    python benchmarks/compatibility.py --only resnet18  # these networks only, nothing written

Every network has random weights, biases and batch-norm statistics. It is planned by the steps of `one_shot_plan` at
30 and 60 % of its parameters, or at the most it allows, and converted. In double precision, the outputs must be those
of the network that has the same weights set to zero but no groups. At the last target the rest of the way is gone too:
gradients, `fold`, an ONNX file that ONNX Runtime runs, a saved file that a fresh network loads.
"""

import argparse
import copy
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from environment import ROOT, describe
from torch import nn

import strucspars as ss
from strucspars.core.hierarchy import num_groups
from strucspars.nn.groupable import Selection, SkippedLayer
from strucspars.nn.layers import dense_weight
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.planning import learned_states, network_size, plan_for_target

TARGETS = (0.3, 0.6)
MOST_PARAMS = 100_000_000
# A network above this share of plain convolutions must not be refused.
MUST_BE_GROUPED = 0.6
LARGEST_ERROR = 1e-9
NO_GRADIENT = 1e-6
IMAGE_SIZES = (64, 96, 224, 256)
JSON_PATH = ROOT / "results" / "compatibility.json"
PAGE_PATH = ROOT / "docs" / "compatibility.md"

# One or a few small members of each family.
# fmt: off
TIMM_NAMES = (
    "botnet26t_256", "coatnet_nano_rw_224", "convmixer_768_32", "convnext_atto", "convnextv2_atto", "cspdarknet53",
    "cspresnet50", "darknet17", "densenet121", "dla34", "dla46_c", "dpn48b", "eca_nfnet_l0", "edgenext_xx_small",
    "efficientformer_l1", "efficientformerv2_s0", "efficientnet_lite0", "efficientvit_b0", "efficientvit_m0",
    "ese_vovnet19b_slim", "fasternet_t0", "fastvit_t8", "fbnetc_100", "focalnet_tiny_srf", "gernet_s", "ghostnet_050",
    "ghostnetv2_100", "hardcorenas_a", "hgnetv2_b0", "hrnet_w18_small", "inception_next_atto", "inception_resnet_v2",
    "inception_v4", "lcnet_050", "legacy_seresnet18", "levit_conv_128s", "mambaout_femto", "mixnet_s",
    "mnasnet_small", "mobilenetv3_small_050", "mobilenetv4_conv_small_035", "mobileone_s0", "mobilevit_xxs",
    "nextvit_small", "nf_regnet_b0", "nf_resnet26", "poolformer_s12", "pvt_v2_b0", "rdnet_tiny", "regnetx_002",
    "repghostnet_050", "repvgg_a0", "repvit_m0_9", "res2net50_14w_8s", "resnest14d", "resnet10t", "resnetv2_18",
    "resnetv2_50x1_bit", "rexnet_100", "selecsls42", "shvit_s1", "skresnet18", "starnet_s050", "swiftformer_xs",
    "tf_efficientnet_b0", "tf_efficientnetv2_b0", "tinynet_e", "tresnet_m", "visformer_tiny", "vit_tiny_patch16_224",
    "xception41",
)
# fmt: on


@dataclass(frozen=True)
class AtTarget:
    """A network after conversion.

    `error` is the largest difference to the outputs of the masked network, relative to the largest output; `effect`,
    the same to those of the network before, shows that the outputs tell grouped from dense at all.
    """

    target: float
    removed_param_fraction: float
    params: int
    macs: int
    grouped_layers: int
    error: float
    effect: float


@dataclass(frozen=True)
class RoundTrip:
    """What happens to a network after conversion; errors are relative to the largest entry.

    `gradient_error` compares the weights' gradients with those of the masked network, `fold_error` and `load_error` the
    outputs with those of the converted one. `untraced` says why `fold` keeps the shuffles, `onnx` why there is no file;
    both are empty if all is well. ONNX Runtime's outputs are compared by `export` itself, in single precision.
    """

    gradient_error: float
    fold_error: float
    untraced: str
    onnx: str
    load_error: float


@dataclass(frozen=True)
class Outcome:
    """One network. A refusal has its reason and no conversions; `rest` tells which layers are not changed."""

    network: str
    library: str
    image_size: int
    params: int
    macs: int
    groupable_fraction: float
    plain_conv_fraction: float
    rest: dict[str, float]
    refusal: str
    conversions: list[AtTarget]
    round_trip: RoundTrip | None


def networks() -> dict[tuple[str, str], Callable[[], nn.Module]]:
    """Every classifier of torchvision below the limit, and the chosen ones of timm, by library and name."""
    found: dict[tuple[str, str], Callable[[], nn.Module]] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        # The page of the pretrained weights knows the size without building the network.
        if torchvision.models.get_model_weights(name).DEFAULT.meta["num_params"] < MOST_PARAMS:
            options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            found["torchvision", name] = partial(torchvision.models.get_model, name, weights=None, **options)
    for name in TIMM_NAMES:
        found["timm", name] = partial(timm.create_model, name, pretrained=False)
    return found


def random_network(build: Callable[[], nn.Module]) -> nn.Module:
    """Random biases, scales and batch-norm statistics, no gain at zero: else wrong orders go unnoticed."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own constructors
        model = build().double().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "running_mean")):
                tensor.normal_(std=0.2)
            elif tensor.is_floating_point() and (tensor.dim() < 2 or not tensor.any()):
                tensor.uniform_(0.5, 1.5)
    return model


def example_image(model: nn.Module) -> torch.Tensor:
    """One image of the smallest size that the network takes."""
    for size in IMAGE_SIZES:
        image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        try:
            with torch.no_grad():
                model(image)
        except (RuntimeError, AssertionError, ValueError):
            if size == IMAGE_SIZES[-1]:
                raise
        else:
            break
    return image


def study(library: str, name: str, build: Callable[[], nn.Module]) -> Outcome:
    """Select, plan, convert and compare one network."""
    model = random_network(build)
    image = example_image(model)
    selection = ss.select_layers(model)
    params = sum(parameter.numel() for parameter in model.parameters())
    refusal, conversions, round_trip = "", [], None
    if not selection.layers:
        refusal = reason_for_refusal(selection)
    else:
        try:
            plans = plans_at_all_targets(model, selection, params)
            conversions = [converted_at(model, target, plan, image) for target, plan in plans.items()]
            round_trip = round_trip_of(model, plans[conversions[-1].target], image, build)
        except Exception as error:  # one network must not end the run
            refusal = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    return Outcome(
        network=name,
        library=library,
        image_size=image.shape[-1],
        params=params,
        macs=ss.count_macs(model, image).macs,
        groupable_fraction=sum(layer.weight.numel() for layer in selection.layers) / params,
        plain_conv_fraction=plain_conv_params(model) / params,
        rest={kind: count / params for kind, count in params_left(selection).most_common(3)},
        refusal=refusal,
        conversions=conversions,
        round_trip=round_trip,
    )


def plans_at_all_targets(model: nn.Module, selection: Selection, params: int) -> dict[float, ss.GroupingPlan]:
    """The plan for every target, the last one for the most that can be removed where that is less."""
    removable = sum(layer.weight.numel() * (1 - 1 / num_groups(layer.largest_level)) for layer in selection.layers)
    states = learned_states(selection.layers, one_shot(TARGETS[0]), None)
    size = network_size(model, None)
    targets = sorted({min(target, removable / params) for target in TARGETS})
    return {target: plan_for_target(selection, states, size, one_shot(target)) for target in targets}


def one_shot(target: float) -> SparsifyConfig:
    """The options of `one_shot_plan`."""
    return SparsifyConfig(target=target, epochs=1, lambda_warmup=0)


def converted_at(model: nn.Module, target: float, plan: ss.GroupingPlan, image: torch.Tensor) -> AtTarget:
    """Convert a copy and compare it with a masked copy."""
    with torch.no_grad():
        expected = ss.mask_(copy.deepcopy(model), plan)(image)
        converted = ss.convert_(copy.deepcopy(model), plan)
        outputs, before = converted(image), model(image)
    count = ss.count_macs(converted, image)
    grouped = sum(layer.group_level > 1 for layer in plan.layers.values())
    return AtTarget(
        target=target,
        removed_param_fraction=plan.removed_param_fraction,
        params=count.params,
        macs=count.macs,
        grouped_layers=grouped,
        error=relative_difference(outputs, expected),
        effect=relative_difference(outputs, before),
    )


def round_trip_of(
    model: nn.Module, plan: ss.GroupingPlan, image: torch.Tensor, build: Callable[[], nn.Module]
) -> RoundTrip:
    """Compute gradients, fold, export, save and load a converted copy."""
    masked, converted = ss.mask_(copy.deepcopy(model), plan), ss.convert_(copy.deepcopy(model), plan)
    for network in (masked, converted):
        network(image).square().sum().backward()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        outputs = converted(image)
        folded = ss.fold(converted, image)
        fold_error, untraced = relative_difference(folded(image), outputs), ss.fold_report(folded).untraced_reason
        ss.save(converted, Path(folder) / "model.safetensors", plan=plan)
        loaded = ss.load(Path(folder) / "model.safetensors", build().double().eval())
        load_error = relative_difference(loaded(image), outputs)
        onnx = ""
        try:
            ss.export(folded.float(), Path(folder) / "model.onnx", example_inputs=image.float())
        except Exception as error:
            onnx = f"{type(error).__name__}: {str(error).splitlines()[0]}".replace(f"{folder}/", "")
    return RoundTrip(gradient_error(masked, converted, plan), fold_error, untraced, onnx, load_error)


def gradient_error(masked: nn.Module, converted: nn.Module, plan: ss.GroupingPlan) -> float:
    """The largest difference of a grouped weight's gradient, relative to its layer's largest entry.

    A gradient below `NO_GRADIENT` of the largest in the network is rounding noise, as in front of a norm that takes
    out what the layer changes; there the difference is relative to that limit.
    """
    gradients = []
    for name, layer in plan.layers.items():
        gradient, expected = (each.get_parameter(f"{name}.weight").grad for each in (converted, masked))
        if layer.group_level > 1 and gradient is not None and expected is not None:
            gradients.append((dense_weight(gradient, layer), expected))
    limit = NO_GRADIENT * max(expected.abs().max().item() for _, expected in gradients)
    return max(
        (each - expected).abs().max().item() / max(expected.abs().max().item(), limit) for each, expected in gradients
    )


def relative_difference(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry; nothing at all where both are zero."""
    largest = expected.abs().max()
    return ((outputs - expected).abs().max() / largest).item() if largest else outputs.abs().max().item()


def plain_conv_params(model: nn.Module) -> int:
    """Weights of plain, ungrouped convolutions of even widths, counted without our own selection."""
    return sum(
        module.weight.numel()
        for module in model.modules()
        if type(module) is nn.Conv2d
        and module.groups == 1
        and module.in_channels % 2 == 0
        and module.out_channels % 2 == 0
    )


def params_left(selection: Selection) -> Counter[str]:
    """Weights of the layers that are not changed, by the kind of layer."""
    left: Counter[str] = Counter()
    for layer in selection.skipped:
        left[kind_of(layer)] += sum(parameter.numel() for parameter in layer.module.parameters())
    return left


def kind_of(layer: SkippedLayer) -> str:
    """Why a layer stays, in a word or two."""
    if type(layer.module) is nn.Conv2d:
        return "Conv2d grouped by its author" if layer.module.groups > 1 else "Conv2d of odd width"
    name = type(layer.module).__name__
    return f"{name} (a subclass of Conv2d)" if isinstance(layer.module, nn.Conv2d) else name


def reason_for_refusal(selection: Selection) -> str:
    """All kinds of layers that were found, none of which can be grouped."""
    kinds = Counter(kind_of(layer) for layer in selection.skipped)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"no groupable convolution among its layers: {listed}"


def is_unexplained(row: dict[str, Any]) -> bool:
    """Refused although most of it could be grouped, or converted to another function, or to one that proves nothing."""
    equal = all(conversion["error"] < LARGEST_ERROR < conversion["effect"] for conversion in row["conversions"])
    if trip := row["round_trip"]:
        equal = equal and all(trip[error] < LARGEST_ERROR for error in ("gradient_error", "fold_error", "load_error"))
    return not equal or (bool(row["refusal"]) and row["plain_conv_fraction"] > MUST_BE_GROUPED)


def markdown(report: dict[str, Any]) -> str:
    """The page, from the report alone."""
    rows = report["networks"]
    versions = ", ".join(f"{name} {version}" for name, version in report["environment"]["versions"].items())
    converted = [row for row in rows if row["conversions"]]
    worst = max(conversion["error"] for row in converted for conversion in row["conversions"])
    least = min(conversion["effect"] for row in converted for conversion in row["conversions"])
    unexplained = [row["network"] for row in rows if is_unexplained(row)]
    trips = [(row["network"], row["round_trip"]) for row in rows if row["round_trip"]]
    return "\n".join(
        [
            "# Compatibility",
            "",
            f"Generated by `{report['environment']['command']}` ({versions}). Do not edit.",
            "",
            f"{len(converted)} of {len(rows)} networks convert; {len(rows) - len(converted)} are refused. Random "
            "weights, one image, double precision: the largest difference between a converted network and the masked "
            f"dense one is {worst:.0e} of the largest output; pruning changes the outputs by {least:.0e} or more.",
            "",
            "Converted to another function, or refused although more than 60 % of the parameters are in plain "
            f"convolutions of even widths: {', '.join(unexplained) or 'none'}.",
            "",
            "*Groupable* is the share of the parameters in convolutions that can be grouped. The next columns hold "
            "what 30 % and 60 % leave of parameters and MACs; where a network does not allow as much (≤), its most. "
            "*Rest* is where the other parameters are: `Linear` layers can be grouped by option (`layer_types`), "
            "subclasses of `Conv2d` are left alone because they may compute something else.",
            "",
            *_round_trips(trips),
            *(line for library in ("torchvision", "timm") for line in _table(library, rows)),
            "## Refused",
            "",
            *(f"- `{row['network']}` ({row['library']}): {row['refusal']}" for row in rows if row["refusal"]),
            "",
        ]
    )


def _round_trips(trips: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What holds for all networks after conversion, and those for which something does not."""
    if not trips:
        return []
    errors = ("gradient_error", "fold_error", "load_error")
    worst = [f"{max(trip[error] for _, trip in trips):.0e}" for error in errors]
    exported = sum(not trip["onnx"] for _, trip in trips)
    return [
        f"At their last target {len(trips)} networks went the whole way. Relative to the largest entry, the gradients "
        f"of the weights differ from those of the masked network by {worst[0]}, the outputs of the folded network by "
        f"{worst[1]}, and those of a fresh network that loaded the saved file by {worst[2]}; ONNX Runtime agrees on "
        f"the exported file of {exported}.",
        "",
        *(f"- `{name}` keeps its shuffles: {trip['untraced']}" for name, trip in trips if trip["untraced"]),
        *(f"- `{name}` has no ONNX file: {trip['onnx']}" for name, trip in trips if trip["onnx"]),
        "",
    ]


def _table(library: str, rows: list[dict[str, Any]]) -> list[str]:
    columns = "network | image | params | MACs | groupable | 30 %: params | MACs | 60 %: params | MACs | rest"
    listed = [row for row in rows if row["library"] == library and row["conversions"]]
    return [
        f"## {library}",
        "",
        f"| {columns} |",
        "| --- |" + " ---: |" * 8 + " --- |",
        *(_line(row) for row in listed),
        "",
    ]


def _line(row: dict[str, Any]) -> str:
    after = [_after(row, conversion) for conversion in row["conversions"]]
    after += ["as before | "] * (len(TARGETS) - len(after))
    rest = ", ".join(f"{kind} {share:.0%}" for kind, share in row["rest"].items() if share >= 0.005)
    size = f"{row['image_size']} | {row['params'] / 1e6:.1f} M | {row['macs'] / 1e6:,.0f} M"
    return f"| {row['network']} | {size} | {row['groupable_fraction']:.0%} | {' | '.join(after)} | {rest} |"


def _after(row: dict[str, Any], conversion: dict[str, Any]) -> str:
    mark = "" if conversion["target"] in TARGETS else "≤ "
    macs_removed = 1 - conversion["macs"] / row["macs"]
    params = f"{mark}{conversion['params'] / 1e6:.1f} M (-{conversion['removed_param_fraction']:.1%})"
    return f"{params} | {conversion['macs'] / 1e6:,.0f} M (-{macs_removed:.1%})"


def main() -> None:
    """Study the networks one after the other, a line each, then write the page and its data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of networks; nothing is written")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    environment = describe(("strucspars", "torch", "torchvision", "timm"))  # now: the tree may change while this runs
    rows = []
    for (library, name), build in networks().items():
        if only and name not in only:
            continue
        row = asdict(study(library, name, build))
        rows.append(row)
        errors = [f"{after['error']:.0e} of {after['effect']:.0e}" for after in row["conversions"]]
        print(f"{library} {name}: {row['refusal'] or ', '.join(errors)}", file=sys.stderr)
    report = json.loads(json.dumps({"environment": environment, "networks": rows}))
    if only:
        print(markdown(report))
    else:
        JSON_PATH.write_text(json.dumps(report, indent=1) + "\n")
        PAGE_PATH.write_text(markdown(report))
    sys.exit(f"unexplained: {bad}" if (bad := [row["network"] for row in rows if is_unexplained(row)]) else 0)


if __name__ == "__main__":
    main()
