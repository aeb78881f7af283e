"""What the public functions compute, recorded."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from golden_networks import images, residual, small
from golden_record import Record, fingerprint_of_groups, some_numbers
from golden_subject import ss
from torch import nn
from torch.nn import functional

CLOSE = 1e-4


def described_plan(plan: Any) -> dict[str, Any]:
    """All that a plan decides, with fingerprints of its connections."""
    layers = {
        name: [
            layer.num_groups,
            fingerprint_of_groups(layer.num_groups, layer.out_perm.tolist(), layer.in_perm.tolist()),
        ]
        for name, layer in plan.layers.items()
    }
    names = ("budget", "target", "min_kept_norm", "removed_param_fraction", "removed_mac_fraction")
    return {"layers": layers} | {name: getattr(plan, name) for name in names}


def numbers_of(scores: torch.Tensor) -> dict[str, Any]:
    """A few of the outputs, and what all of them come to."""
    flat = scores.detach().flatten()
    return {"shape": list(scores.shape), "first": some_numbers(flat.tolist()), "norm": float(flat.norm())}


@pytest.fixture(scope="module")
def plan() -> Any:
    return ss.one_shot_plan(residual(), target=0.5, example_inputs=images())


@pytest.fixture(scope="module")
def converted(plan: Any) -> nn.Module:
    model: nn.Module = ss.convert_(residual(), plan)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("params", {"target": 0.5}),
        ("macs", {"target": 0.4, "budget": "macs"}),
        ("wide-groups", {"target": 0.3, "min_channels_per_group": 8, "importance": "l2", "seed": 5}),
        ("of-the-paper", {"target": 0.5, "method": "paper"}),
    ],
)
def test_a_one_shot_plan_of_a_small_network_is_the_recorded_one(
    golden: Record, name: str, options: dict[str, Any]
) -> None:
    inputs = images() if options.get("budget") == "macs" else None
    golden.check(
        f"plan-{name}",
        described_plan(ss.one_shot_plan(residual(), ss.SparsifyConfig(**options), example_inputs=inputs)),
    )


def test_a_one_shot_plan_of_resnet18_is_the_recorded_one(golden: Record) -> None:
    torchvision_models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = torchvision_models.resnet18(num_classes=10)
    golden.check("plan-resnet18", described_plan(ss.one_shot_plan(model, target=0.5)))


def test_a_sparsifier_reports_its_epochs_and_plans_as_recorded(golden: Record) -> None:
    torch.manual_seed(0)
    model = small(4)
    config = ss.SparsifyConfig(
        target=0.6, epochs=4, controller="paper", lambda_step=5e-3, lambda_warmup=0, min_kept_norm=0.535
    )
    sparsifier = ss.Sparsifier(model, config, example_inputs=images(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    labels = torch.arange(4)
    losses, reports = [], []
    for _ in range(4):
        for _ in range(8):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images()), labels)
            torch.autograd.backward(loss)
            sparsifier.regularize_()
            optimizer.step()
            losses.append(loss.item())
        reports.append(sparsifier.end_epoch())
    found = {"losses": losses[::4], "reports": reports, "lambda": sparsifier.lambda_value}
    golden.check("sparsifier", found | {"plan": described_plan(sparsifier.plan())})


def test_the_default_penalty_steps_as_recorded(golden: Record) -> None:
    sparsifier = ss.Sparsifier(
        residual(), ss.SparsifyConfig(target=0.4, controller="paper", epochs=30, lambda_warmup=10 / 30)
    )
    values = []
    for _ in range(30):
        values.append(sparsifier.lambda_value)
        sparsifier.end_epoch()
    golden.check("lambda", values[::3])


def test_converted_and_masked_networks_compute_the_recorded_outputs(
    golden: Record, plan: Any, converted: nn.Module
) -> None:
    masked = ss.mask_(residual(), plan)(images())
    outputs = converted(images())
    torch.testing.assert_close(outputs, masked, rtol=CLOSE, atol=1e-5)
    golden.check("outputs", {"dense": numbers_of(residual()(images())), "grouped": numbers_of(outputs)}, rel=CLOSE)


def test_training_steps_of_both_forms_come_to_the_recorded_weights(golden: Record, plan: Any) -> None:
    found = {}
    for name, change in (("grouped", ss.convert_), ("masked", ss.mask_)):
        model = residual()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
        change(model, plan, optimizer)
        model.train()
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(images()), torch.arange(4)))
            optimizer.step()
        found[name] = numbers_of(model.eval()(images()))
    golden.check("trained-outputs", found)


@pytest.mark.parametrize("width", [1, 16])
def test_a_folded_network_computes_and_reports_as_recorded(golden: Record, converted: nn.Module, width: int) -> None:
    folded = ss.fold(converted, images(), widen_groups_below=width)
    report = ss.fold_report(folded)
    outputs = folded(images())
    torch.testing.assert_close(outputs, converted(images()), rtol=CLOSE, atol=1e-5)
    found = {
        "outputs": numbers_of(outputs),
        "gathers": [[each.layer, each.side, each.channels, each.nbytes] for each in report.gathers],
        "gathered_bytes": report.gathered_bytes,
        "batch norms": report.num_kept_batch_norms,
        "untraced": report.untraced_reason,
        "widened": report.widened,
        "text": str(report).splitlines(),
    }
    golden.check(f"folded-{width}", found, rel=CLOSE)


def test_an_exported_file_has_the_recorded_graph_and_metadata(
    golden: Record, converted: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "small.onnx"
    report = ss.export(converted, path, example_inputs=images())
    model = onnx.load(path)
    operations = Counter(node.op_type for node in model.graph.node)
    (outputs,) = ss.OnnxRunner(path)(images())
    torch.testing.assert_close(torch.as_tensor(outputs), converted(images()).detach(), rtol=CLOSE, atol=1e-5)
    found = {
        "inputs": [value.name for value in model.graph.input],
        "outputs": [value.name for value in model.graph.output],
        "opsets": {each.domain: each.version for each in model.opset_import},
        "metadata": sorted(each.key for each in model.metadata_props),
        "gathers": operations["Gather"],
        "convolutions": operations["Conv"],
        "batch norms": operations["BatchNormalization"],
        "report": {name: getattr(report, name) for name in ("num_gathers", "gathered_bytes", "format")},
    }
    golden.check("exported", found)


def test_a_saved_network_loads_with_its_plan_and_outputs(converted: nn.Module, plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    ss.save(converted, path, plan=plan)
    loaded = ss.load(path, residual()).eval()
    assert torch.equal(loaded(images()), converted(images()))
    assert described_plan(ss.model_plan(loaded))["layers"] == {
        name: layer for name, layer in described_plan(plan)["layers"].items() if layer[0] > 1
    }


def test_networks_are_counted_as_recorded(golden: Record, plan: Any, converted: nn.Module) -> None:
    one = images(1)
    found = {
        "dense": ss.count_macs(residual(), one),
        "planned": ss.count_macs(residual(), one, plan),
        "converted": ss.count_macs(converted, one),
    }
    totals = {name: [count.params, count.macs, count.paper_flops] for name, count in found.items()}
    layers = {name: [layer.params, layer.macs] for name, layer in found["converted"].layers.items()}
    golden.check("counts", {"totals": totals, "layers": layers})


def test_summaries_of_all_forms_read_as_recorded(golden: Record, plan: Any, converted: nn.Module) -> None:
    one = images(1)
    masked = ss.mask_(copy.deepcopy(residual()), plan)
    found = {
        "planned": ss.summary(residual(), one, plan),
        "masked": ss.summary(masked, one),
        "converted": ss.summary(converted, one),
        "folded": ss.summary(ss.fold(converted, one), one),
    }
    golden.check("summaries", {name: str(each).splitlines() for name, each in found.items()})
