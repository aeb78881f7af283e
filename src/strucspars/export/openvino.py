"""OpenVINO's two files, in full precision."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from strucspars.export.onnx import GraphExporter, write_onnx
from strucspars.export.program import (
    Arguments,
    Inference,
    first_line,
    optional_module,
    without_chatter,
)

if TYPE_CHECKING:
    import onnx

# Otherwise OpenVINO computes in bfloat16 on processors that support it.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"}


@final
class OpenVinoExporter(GraphExporter):
    """An `.xml` file with a `.bin` file of its weights. Needs `pip install 'strucspars[openvino]'`."""

    suffix = ".xml"
    # With narrower groups a small network takes more than twice as long (docs/decisions/0014-inference.md).
    group_width = 16
    int8_group_width = 16

    def runtime(self) -> str:
        """The version of OpenVINO."""
        openvino = optional_module("openvino", extra="openvino")
        return f"OpenVINO {openvino.__version__.partition('-')[0]}"

    def write_graph(self, model: onnx.ModelProto, path: Path) -> None:
        """Write both files."""
        # OpenVINO 2026.4 moves a constant Gather along axis 1 into the dense convolution after it and applies the
        # inverse of its order. It does not look for axes counted from the end, which cost the same.
        count_axes_from_the_end_(model.graph)
        write_openvino(model, path)

    def load(self, path: Path) -> Inference:
        """The network on the CPU, in full precision."""
        openvino = optional_module("openvino", extra="openvino")
        with without_chatter():
            try:
                compiled = openvino.Core().compile_model(openvino.Core().read_model(path), "CPU", EXACT)
            except RuntimeError as error:
                raise ValueError(_reasons(error)) from error

        def run(arguments: Arguments) -> list[torch.Tensor]:
            outputs = compiled([tensor.numpy() for tensor in arguments])
            return [torch.from_numpy(outputs[place].copy()) for place in range(len(compiled.outputs))]

        return run


def count_axes_from_the_end_(graph: onnx.GraphProto) -> None:
    """Let every Gather along axis 1 count that axis from the end, where its rank is known: the same function."""
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.output, *graph.value_info)
        if value.type.tensor_type.HasField("shape")
    }
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Gather" else ():
            if attribute.name == "axis" and attribute.i == 1 and node.input[0] in ranks:
                attribute.i -= ranks[node.input[0]]


def write_openvino(proto: onnx.ModelProto, path: Path) -> None:
    """Write an ONNX model as OpenVINO's files."""
    openvino = optional_module("openvino", extra="openvino")
    # On the disk of the files, so that an error is about that disk.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, without_chatter():
        source = Path(folder) / "network.onnx"
        write_onnx(proto, source)
        try:
            # Not openvino.convert_model, which may report its use over the network.
            model = openvino.Core().read_model(source)
        except RuntimeError as error:
            raise ValueError(f"OpenVINO cannot read the network: {_reasons(error)}; try another format") from error
        for entry in proto.metadata_props:
            model.set_rt_info(entry.value, entry.key.split("."))
        try:
            openvino.save_model(model, path, compress_to_fp16=False)
        except RuntimeError as error:
            # OpenVINO says "iostream error" for every cause; writing the same amount raises the system's own error.
            path.write_bytes(bytes(2 * source.stat().st_size))
            raise OSError(
                f"OpenVINO cannot write {path.name}: {first_line(error)}; choose another folder or format"
            ) from error


def _reasons(error: RuntimeError) -> str:
    """The reasons in OpenVINO's message, without the places in its source, which end in a colon."""
    lines = dict.fromkeys(line.strip("- ") for line in str(error).splitlines())
    reasons = [line for line in lines if line and not line.endswith(":")]
    return "; ".join(reasons).rstrip(".") or first_line(error)
