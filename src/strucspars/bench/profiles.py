"""How long files take in a runtime, and which share of that each layer takes, by the runtime's own profile."""

import json
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from strucspars.bench.suite import TimingRules, interleaved_times, quartiles
from strucspars.export.onnx import OnnxExporter
from strucspars.export.openvino import EXACT, OpenVinoExporter
from strucspars.export.program import Exporter, without_chatter
from strucspars.io.arrays import load_arrays, save_arrays
from strucspars.io.files import read_text, write_text
from strucspars.io.records import as_record, parse_json
from strucspars.sparsify.calibration import OnProgress

PROFILED_CALLS = 12
PROFILE_BYTES = 2**28
# In the folder of the files, for a process that times them.
JOB, INPUTS, OUTCOME = "job.json", "inputs.npz", "timed.json"
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TimedFile:
    """Seconds of a call, quartiles; and from the profile, those of the layers by name, and of all operations."""

    seconds: tuple[float, float, float]
    layers: Mapping[str, float]
    profiled: float


class ProfiledRuntime(ABC):
    """A runtime that reports how long each layer of a file takes; one core, float32."""

    exporter: Exporter

    @property
    def title(self) -> str:
        """Its name and version."""
        return self.exporter.runtime()

    def timed(
        self, files: Sequence[Path], inputs: Sequence[Array], rules: TimingRules, on_progress: OnProgress
    ) -> list[TimedFile]:
        """Time the files in turn, then profile each."""
        programs = {place: partial(self.load(file), list(inputs)) for place, file in enumerate(files)}
        times = interleaved_times(
            programs, rules, on_round=lambda _, elapsed: on_progress("timing networks", *_of(elapsed, rules))
        )
        found = []
        for place, file in enumerate(files):
            layers, profiled = self.profile(file, list(inputs))
            found.append(TimedFile(seconds=quartiles(times[place]), layers=layers, profiled=profiled))
        return found

    @abstractmethod
    def load(self, path: Path) -> Callable[[list[Any]], object]:
        """The program in a file."""

    @abstractmethod
    def profile(self, path: Path, inputs: list[Any]) -> tuple[Mapping[str, float], float]:
        """Seconds of every layer, by its name, and of all operations together."""


@final
class ProfiledOnnxRuntime(ProfiledRuntime):
    """ONNX Runtime. It calls a fused operation by the last value or node that went into it."""

    exporter = OnnxExporter()

    def load(self, path: Path) -> Callable[[list[Any]], object]:
        """The program in a file."""
        return self._program(path, self._options())

    def profile(self, path: Path, inputs: list[Any]) -> tuple[Mapping[str, float], float]:
        """Seconds of every layer, and of all operations together."""
        import onnx

        options = self._options()
        options.enable_profiling, options.profile_file_prefix = True, str(path.with_suffix(""))
        program = self._program(path, options)
        for _ in range(PROFILED_CALLS):
            program(inputs)
        trace = Path(program.keywords["session"].end_profiling())
        events = [event for event in parse_json(read_text(trace, limit=PROFILE_BYTES), str(trace)) if _is_kernel(event)]
        seconds: dict[str, list[float]] = defaultdict(list)
        for event in events:
            seconds[event["name"].removesuffix("_kernel_time")].append(event["dur"] / 1e6)
        layers = _layers_of_nodes(onnx.load(path).graph, seconds)
        return _by_layer({name: float(np.median(each)) for name, each in seconds.items()}, layers)

    def _options(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        return options

    def _program(self, path: Path, options: Any) -> "partial[object]":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return partial(_run_session, session=session)


def _run_session(inputs: list[Any], *, session: Any) -> object:
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))


def _is_kernel(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time")


# What a runtime may compute together with the convolution or matrix product before it.
FUSED = {"Add", "BatchNormalization", "Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Mul"}
FUSED |= {"PRelu", "QuickGelu", "Relu", "Sigmoid", "Softplus", "Sum", "Tanh"}


def _layers_of_nodes(graph: Any, executed: Iterable[str]) -> dict[str, str]:
    """The layer that each executed operation computes, of those that compute one.

    An operation has the name of a node or, with a suffix, that of the value it makes. Fused ones have the name of the
    last node or value: of the layers before it, it is the latest without an operation of its own.
    """
    weights = {value.name for value in graph.initializer}
    behind: dict[str, list[str]] = defaultdict(list)  # by node and by value: layers that end there, in order
    own: dict[str, str] = {}
    for node in graph.node:
        weight = next((name for name in node.input if name in weights and name.endswith(".weight")), None)
        if weight is not None and node.op_type in ("Conv", "Gemm", "MatMul"):
            layer = weight.removesuffix(".weight")
            own[node.name] = own[node.output[0]] = layer
            ends = [layer]
        else:
            ends = [layer for name in node.input for layer in behind[name]] if node.op_type in FUSED else []
        for name in (node.name, *node.output):
            behind[name] = ends
    order = {layer: place for place, layer in enumerate(dict.fromkeys(own.values()))}
    plain = {name: name.removesuffix("_nchwc").removeprefix("fused ") for name in executed}
    found = {name: own[bare] for name, bare in plain.items() if bare in own}
    for name, bare in plain.items():
        left = [layer for layer in behind.get(bare, ()) if layer not in found.values()]
        if name not in found and left:
            found[name] = max(left, key=order.__getitem__)
    return found


def _by_layer(seconds: Mapping[str, float], layers: Mapping[str, str]) -> tuple[dict[str, float], float]:
    total: dict[str, float] = defaultdict(float)
    for name, layer in layers.items():
        total[layer] += seconds[name]
    return dict(total), sum(seconds.values())


@final
class ProfiledOpenVino(ProfiledRuntime):
    """OpenVINO, in a process of its own: several of its compiled networks leave the memory of a process damaged."""

    exporter = OpenVinoExporter()

    def timed(
        self, files: Sequence[Path], inputs: Sequence[Array], rules: TimingRules, on_progress: OnProgress
    ) -> list[TimedFile]:
        """Time and profile the files, which lie in one folder, in another process."""
        folder = files[0].parent
        save_arrays(folder / INPUTS, {f"{place:03}": array for place, array in enumerate(inputs)})
        write_text(folder / JOB, json.dumps({"files": [file.name for file in files], "rules": asdict(rules)}))
        command = [sys.executable, "-m", __name__, str(folder)]
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                while process.poll() is None:
                    on_progress("timing networks", *_of(time.perf_counter() - begin, rules))
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.5)
            except BaseException:
                process.kill()
                raise
            said = process.stderr.read() if process.stderr is not None else ""
        if process.returncode:
            last = (said.strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
            raise ValueError(f"{self.title} could not time the layers: {last}; use runtime='onnxruntime'")
        return [
            as_record(TimedFile, each, OUTCOME)
            for each in parse_json(read_text(folder / OUTCOME, limit=PROFILE_BYTES), OUTCOME)
        ]

    def load(self, path: Path) -> Callable[[list[Any]], object]:
        """The program in a file."""
        return partial(self._compiled(path, {})[0].infer)

    def profile(self, path: Path, inputs: list[Any]) -> tuple[Mapping[str, float], float]:
        """Seconds of every layer, and of all operations together."""
        request, model = self._compiled(path, {"PERF_COUNT": "YES"})
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in range(PROFILED_CALLS):
            request.infer(inputs)
            for operation in request.profiling_info:
                seconds[operation.node_name].append(operation.real_time.total_seconds())
        layers = {name: layer for name, layer in _layers_of_operations(model).items() if name in seconds}
        return _by_layer({name: float(np.median(each)) for name, each in seconds.items()}, layers)

    def _compiled(self, path: Path, more: Mapping[str, str]) -> tuple[Any, Any]:
        import openvino

        with without_chatter():
            model = openvino.Core().read_model(path)
            compiled = openvino.Core().compile_model(model, "CPU", {**EXACT, "PERFORMANCE_HINT": "LATENCY", **more})
        return compiled.create_infer_request(), model


def _of(elapsed: float, rules: TimingRules) -> tuple[int, int]:
    return min(round(elapsed), round(rules.seconds)), round(rules.seconds)


def _layers_of_operations(model: Any) -> dict[str, str]:
    """The layer of every operation that has a weight, through the reshapes between the two."""
    layers: dict[str, str] = {}
    for operation in model.get_ordered_ops():
        if operation.get_type_name() not in ("Convolution", "GroupConvolution", "MatMul"):
            continue
        source = operation.input_value(1).get_node()
        while source.get_type_name() in ("Convert", "Reshape", "Transpose"):
            source = source.input_value(0).get_node()
        name = source.get_friendly_name()
        if name.endswith(".weight"):
            own = operation.get_friendly_name()
            # A product with its bias added is profiled under the name of both.
            layers |= dict.fromkeys((own, own.removesuffix("/WithoutBiases")), name.removesuffix(".weight"))
    return layers


RUNTIMES: Mapping[str, Callable[[], ProfiledRuntime]] = {
    "onnxruntime": ProfiledOnnxRuntime,
    "openvino": ProfiledOpenVino,
}


def main(folder: Path) -> None:
    """In the process that OpenVINO has for itself: time the files that the job names."""
    job = parse_json(read_text(folder / JOB, limit=PROFILE_BYTES), JOB)
    inputs = load_arrays(folder / INPUTS)
    timed = ProfiledRuntime.timed(
        ProfiledOpenVino(),
        [folder / name for name in job["files"]],
        [inputs[name] for name in sorted(inputs)],
        TimingRules(**job["rules"]),
        lambda what, done, total: None,
    )
    write_text(folder / OUTCOME, json.dumps([asdict(each) for each in timed]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
