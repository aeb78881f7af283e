"""Times of layers, measured inside small networks."""

import logging
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import strucspars as ss
from strucspars.bench import latency, profiles
from strucspars.bench.latency import latency_table
from strucspars.bench.profiles import ProfiledOpenVino, _layers_of_nodes
from strucspars.bench.suite import TimingRules
from strucspars.cost.latency import cache_folder
from strucspars.sparsify.config import Runtime, SparsifyConfig

EXAMPLE = torch.zeros(1, 32, 6, 6)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "RULES", TimingRules(seconds=0.1, visit_seconds=0.01, min_rounds=1, max_rounds=1))
    monkeypatch.setattr(profiles, "PROFILED_CALLS", 2)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm2d(32)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.first(images).relu()
        outputs: torch.Tensor = self.last((self.norm(self.second(features)) + features).relu())
        return outputs


@pytest.mark.parametrize(("runtime", "title"), [("onnxruntime", "ONNX Runtime"), ("openvino", "OpenVINO")])
def test_every_layer_has_a_time_at_every_level(runtime: Runtime, title: str) -> None:
    table = latency_table(Residual(), EXAMPLE, SparsifyConfig(runtime=runtime))
    assert list(table.layers) == ["first", "second", "last"]
    assert {len(ms) for ms in table.layers.values()} == {6}
    assert all(time > 0 for ms in table.layers.values() for time in ms)
    assert sum(ms[0] for ms in table.layers.values()) <= table.dense_ms * (1 + 1e-9)
    assert table.runtime.startswith(title)


def test_a_process_that_fails_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "damaged.xml").write_text("no network")
    with pytest.raises(ValueError, match=r"OpenVINO \S+ could not time the layers: .+; use runtime='onnxruntime'"):
        ProfiledOpenVino().timed([tmp_path / "damaged.xml"], [], latency.RULES, lambda what, done, total: None)


def test_a_layer_that_is_not_called_takes_no_time() -> None:
    model = Residual()
    model.unused = nn.Conv2d(32, 32, 1)
    table = latency_table(model, EXAMPLE, SparsifyConfig())
    assert table.ms_by_level("unused", 2) == (0.0, 0.0)
    plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=0.0, budget="latency"), example_inputs=EXAMPLE)
    assert plan.layers["unused"].num_groups == 1


def test_the_rules_for_layers_decide_what_is_timed_in_groups() -> None:
    model = nn.Sequential(nn.Conv2d(32, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 1))
    table = latency_table(model, EXAMPLE, SparsifyConfig(exclude=("0",), orders="shared"))
    assert list(table.layers) == ["2"]


def test_linear_layers_in_groups_cannot_be_timed_and_an_error_names_one() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32 * 36, 64))
    with pytest.raises(ValueError, match="lacks layer '1', so its time is not known; exclude the layer"):
        latency_table(model, EXAMPLE, SparsifyConfig(layer_types=("Conv2d", "Linear")))


def test_other_activations_are_measured_anew() -> None:
    for activation in (nn.ReLU(), nn.SiLU()):
        latency_table(nn.Sequential(nn.Conv2d(32, 32, 1), activation), EXAMPLE, SparsifyConfig())
    assert len(list(cache_folder().iterdir())) == 2


def test_copies_are_expected_where_layers_have_orders_of_their_own() -> None:
    model = Residual()
    sides = {shuffle.layers: shuffle.free_sides for shuffle in latency_table(model, EXAMPLE, SparsifyConfig()).shuffles}
    # The input and the output have their natural order; the stream has two writers and two readers.
    assert sides == {("first",): 0, ("first", "second", "second", "last"): 1, ("last",): 0}
    shared = latency_table(model, EXAMPLE, SparsifyConfig(orders="shared"))
    assert {shuffle.layers for shuffle in shared.shuffles} == {("first",), ("last",)}


def test_a_network_that_cannot_be_traced_is_an_error_that_names_the_line() -> None:
    class Opaque(nn.Sequential):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.Tensor(self[0](images))  # no symbol becomes a tensor

    with pytest.raises(ValueError, match=r"tracing stopped in \(model\) \(Opaque\), .*test_latency\.py"):
        latency_table(Opaque(nn.Conv2d(32, 32, 1)), EXAMPLE, SparsifyConfig())


def test_times_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Residual()
    first = latency_table(model, EXAMPLE, SparsifyConfig())
    monkeypatch.setattr(latency, "_measured", None)
    assert latency_table(model, EXAMPLE, SparsifyConfig(target=0.7)) == first
    with pytest.raises(TypeError):  # another network, so it measures
        latency_table(nn.Sequential(nn.Conv2d(32, 8, 1)), EXAMPLE, SparsifyConfig())
    with pytest.raises(TypeError):
        latency_table(model, EXAMPLE[..., :4], SparsifyConfig())


def test_other_hardware_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 1))
    here = latency_table(model, EXAMPLE, SparsifyConfig())
    monkeypatch.setattr(latency, "hardware", lambda known: {"cpu": "another processor"})
    there = latency_table(model, EXAMPLE, SparsifyConfig())
    assert there.machine == "another processor" != here.machine
    assert len(list(cache_folder().iterdir())) == 2


@pytest.mark.parametrize("content", ["", "not JSON", "{}"])
def test_a_damaged_table_is_measured_again_with_a_remark(caplog: pytest.LogCaptureFixture, content: str) -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 1))
    table = latency_table(model, EXAMPLE, SparsifyConfig())
    (path,) = cache_folder().iterdir()
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        again = latency_table(model, EXAMPLE, SparsifyConfig())
    assert "the layers are timed again, because the table of their times cannot be read" in caplog.text
    assert again.network == table.network
    assert latency_table(model, EXAMPLE, SparsifyConfig()) == again


def test_times_that_cannot_be_kept_are_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "a file"
    place.write_text("")
    monkeypatch.setenv("STRUCSPARS_CACHE", str(place))
    with caplog.at_level(logging.WARNING):
        table = latency_table(nn.Sequential(nn.Conv2d(32, 32, 1)), EXAMPLE, SparsifyConfig())
    assert table.dense_ms > 0
    assert "not kept for the next time" in caplog.text


def test_an_unknown_runtime_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="runtime must be one of onnxruntime, openvino, got 'tensorrt'"):
        SparsifyConfig(runtime="tensorrt")  # type: ignore[arg-type]  # by name


def test_the_network_does_not_change() -> None:
    model = Residual().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    latency_table(model, EXAMPLE, SparsifyConfig())
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_plan_for_milliseconds_is_measured_exported_and_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3))
    images = torch.randn(1, 64, 20, 20)
    plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=0.1, budget="latency"), example_inputs=images)
    assert plan.latency is not None
    assert plan.latency.expected_ms <= 0.9 * plan.latency.dense_ms
    ss.convert_(model, plan)
    assert ss.export(model, tmp_path / "small.onnx", example_inputs=images).path.is_file()


def graph(*nodes: Any, weights: tuple[str, ...]) -> Any:
    initializers = [helper.make_tensor(f"{name}.weight", onnx.TensorProto.FLOAT, [1], [0.0]) for name in weights]
    return helper.make_graph(nodes, "graph", [], [], initializers)


def test_fused_operations_belong_to_the_layer_whose_own_name_is_missing() -> None:
    two = graph(
        helper.make_node("Conv", ["x", "a.weight"], ["a_out"], name="node_a"),
        helper.make_node("Relu", ["a_out"], ["relu"], name="node_relu"),
        helper.make_node("Conv", ["relu", "b.weight"], ["b_out"], name="node_b"),
        helper.make_node("Conv", ["relu", "c.weight"], ["c_out"], name="node_c"),
        helper.make_node("Add", ["b_out", "c_out"], ["sum"], name="node_add"),
        helper.make_node("Relu", ["sum"], ["end"], name="node_end"),
        weights=("a", "b", "c"),
    )
    fused_into_b = _layers_of_nodes(two, ["relu_nchwc", "c_out_nchwc", "end_nchwc", "ReorderInput"])
    assert fused_into_b == {"relu_nchwc": "a", "c_out_nchwc": "c", "end_nchwc": "b"}
    fused_into_c = _layers_of_nodes(two, ["relu_nchwc", "b_out_nchwc", "end_nchwc"])
    assert fused_into_c == {"relu_nchwc": "a", "b_out_nchwc": "b", "end_nchwc": "c"}
    plain = _layers_of_nodes(two, ["node_a", "node_relu", "fused node_b", "node_c", "node_add", "node_end"])
    assert plain == {"node_a": "a", "fused node_b": "b", "node_c": "c"}
