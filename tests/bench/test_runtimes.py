"""Each runtime computes what PyTorch does, and those that are missing are no error."""

import copy
import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch_warnings import COMPILER_WARNS

from strucspars.bench import runtimes as inference_forms
from strucspars.bench.networks import BenchNetwork, random_networks
from strucspars.bench.runtimes import (
    RUNTIMES,
    InferenceForms,
    known_runtime,
    torch_threads,
)
from strucspars.convert.comparison import compare_outputs, random_image

SHAPE = (3, 16, 16)


@pytest.fixture(scope="module")
def network() -> BenchNetwork:
    return random_networks("cifar-resnet8", [0.6], image_shape=SHAPE, num_classes=5)[1]


@pytest.fixture(scope="module")
def forms(network: BenchNetwork, tmp_path_factory: pytest.TempPathFactory) -> InferenceForms:
    """Exported once for all tests."""
    return InferenceForms(network.model, random_image(SHAPE), tmp_path_factory.mktemp("forms"))


@COMPILER_WARNS
# Compiling takes long: once is enough.
@pytest.mark.parametrize(
    ("name", "batch"), [(name, batch) for name in RUNTIMES for batch in (1, 3) if (name, batch) != ("torch-compile", 3)]
)
def test_a_runtime_computes_what_pytorch_does(name: str, batch: int, forms: InferenceForms) -> None:
    runtime = known_runtime(name)
    if not runtime.is_installed:
        pytest.skip(f"{runtime.title} is not installed")
    if name == "torch-compile" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a compiler")
    images = np.random.default_rng(0).standard_normal((batch, *SHAPE), dtype=np.float32)
    program = runtime.prepare(forms, batch, 1)
    with torch.no_grad():
        expected = forms.model(torch.from_numpy(images)).numpy()
    assert program(images).shape == (batch, 5)
    compared = compare_outputs(torch.tensor(program(images)), torch.tensor(expected))
    assert compared.relative_error < 0.2 if runtime.is_int8 else not compared.complaint


def test_files_and_folded_graph_are_made_once(forms: InferenceForms) -> None:
    assert forms.folded is forms.folded
    written = forms.exported("onnx").path.stat().st_mtime_ns
    assert forms.exported("onnx").path.stat().st_mtime_ns == written
    assert known_runtime("pytorch").gathers(forms)[0] > 0


def test_gathers_are_those_of_the_graph_that_a_runtime_runs(forms: InferenceForms) -> None:
    left = {name: known_runtime(name).gathers(forms) for name in ("onnxruntime", "pytorch", "torch-compile")}
    # Its groups are widened by default, until some shuffles are no longer needed.
    assert left["onnxruntime"][0] < left["pytorch"][0]
    assert left["onnxruntime"][1] < left["pytorch"][1]
    assert left["torch-compile"] == left["pytorch"]
    written = onnx.load(forms.exported("onnx").path).graph.node
    assert left["onnxruntime"][0] == sum(node.op_type == "Gather" for node in written)


def test_int8_files_are_smaller_and_files_of_their_own(forms: InferenceForms) -> None:
    float32, int8 = known_runtime("onnxruntime"), known_runtime("onnxruntime-int8")
    sizes = [runtime.nbytes(forms) for runtime in (float32, int8, known_runtime("pytorch"))]
    assert sizes[0] == forms.exported("onnx").path.stat().st_size
    assert sizes[0] != sizes[1] == forms.exported("onnx", int8=True).path.stat().st_size
    assert sizes[2] is None


def test_groups_can_be_widened(network: BenchNetwork, tmp_path: Path) -> None:
    plain, wide = (
        InferenceForms(network.model, torch.zeros(1, *SHAPE), tmp_path, widen_groups_below=width) for width in (1, 64)
    )
    params = [sum(parameter.numel() for parameter in forms.folded.parameters()) for forms in (plain, wide)]
    assert params[0] < params[1]


@pytest.mark.parametrize("width", [None, 1, 64])
def test_files_get_the_width_of_groups_that_was_asked_for(
    width: int | None, network: BenchNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int | None]] = []

    def noted(model: object, path: Path, *, widen_groups_below: int | None = 99, **options: object) -> str:
        asked.append((path.name, widen_groups_below))
        return path.name

    monkeypatch.setattr(inference_forms, "export", noted)
    forms = InferenceForms(network.model, random_image(SHAPE), tmp_path, widen_groups_below=width)
    for _ in range(2):
        assert [str(forms.exported(name)) for name in ("onnx", "openvino")] == ["onnx.onnx", "openvino.xml"]
    # Once each.
    assert asked == [("onnx.onnx", width), ("openvino.xml", width)]


def test_pytorch_runs_the_folded_graph_and_not_the_network(network: BenchNetwork, tmp_path: Path) -> None:
    forms = InferenceForms(copy.deepcopy(network.model), random_image(SHAPE), tmp_path)
    called: list[nn.Module] = []
    for module in (forms.folded, forms.model):
        module.register_forward_hook(lambda module, inputs, outputs: called.append(module))
    known_runtime("pytorch").prepare(forms, 1, 1)(random_image(SHAPE).numpy())
    assert called == [forms.folded]


def test_onnx_runtime_gets_its_threads(forms: InferenceForms, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forms.exported("onnx").path.is_file()
    real, seen = onnxruntime.InferenceSession, []

    def session(path: Path, options: Any, **others: Any) -> Any:
        seen.append((options.intra_op_num_threads, options.inter_op_num_threads))
        return real(path, options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    known_runtime("onnxruntime").prepare(forms, 1, 3)
    assert seen == [(3, 1)]


def test_openvino_gets_its_threads_and_computes_in_full_precision(
    forms: InferenceForms, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    assert forms.exported("openvino").path.is_file()
    seen: list[Mapping[str, object]] = []

    class Watched(openvino.Core):  # type: ignore[misc, name-defined]  # no types
        def compile_model(self, model: Any, device: str, settings: Mapping[str, object]) -> Any:
            seen.append(settings)
            return super().compile_model(model, device, settings)

    monkeypatch.setattr(openvino, "Core", Watched)
    known_runtime("openvino").prepare(forms, 1, 2)
    assert [(each["INFERENCE_NUM_THREADS"], each["INFERENCE_PRECISION_HINT"]) for each in seen] == [(2, "f32")]


def test_an_unknown_runtime_is_an_error_that_suggests_one() -> None:
    with pytest.raises(ValueError, match=r"no runtime 'onnx-runtime'; did you mean 'onnxruntime'\?"):
        known_runtime("onnx-runtime")
    with pytest.raises(ValueError, match="Runtimes are onnxruntime, pytorch, torch-compile, openvino"):
        known_runtime("x")


def test_a_runtime_that_cannot_be_imported_is_missing() -> None:
    absent = replace(known_runtime("openvino"), package="no_such_package")
    assert importlib.util.find_spec(absent.package) is None
    assert not absent.is_installed
    assert known_runtime("pytorch").is_installed


def test_pytorchs_threads_are_given_back_also_after_an_error() -> None:
    before = torch.get_num_threads()
    inside = []

    def fails() -> None:
        with torch_threads(before + 1):
            inside.append(torch.get_num_threads())
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fails()
    assert inside == [before + 1]
    assert torch.get_num_threads() == before


def test_pytorchs_threads_are_given_back_as_they_were() -> None:
    with torch_threads(3):
        with torch_threads(2):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
