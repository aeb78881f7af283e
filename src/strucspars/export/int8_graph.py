"""The int8 graph of a network: 8-bit weights, and quantise/dequantise pairs around its operations.

ONNX Runtime's quantiser writes it; ONNX Runtime and OpenVINO both read it. See docs/how-to/int8.md for what each makes
of such a graph.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strucspars.export.program import PRECISION_KEY, Arguments, ExampleBatch, without_chatter

if TYPE_CHECKING:
    import onnx

# Images per call.
STEP = 16
# Images per batch of the calibration (docs/decisions/0023-int8.md).
RANGE_IMAGES = 8
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def steps(images: torch.Tensor, batch: ExampleBatch, size: int = STEP) -> Iterator[Arguments]:
    """Images in calls that a file takes; a file of a fixed batch size leaves out an incomplete last one."""
    size = size if batch.is_dynamic else batch.sizes[0]
    for start in range(0, len(images), size):
        part = images[start : start + size]
        if batch.is_dynamic or len(part) == size:
            yield (part.contiguous(),)


def _op_types() -> list[str]:
    """The operations that are quantised: all that the library can."""
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    return sorted({*QDQRegistry, *QLinearOpsRegistry})


def _layer(node: onnx.NodeProto) -> str:
    """The name of a layer in the network, that of its weight; a weight that was transposed has lost it."""
    weight = str(node.input[1])
    return weight.removesuffix(".weight") if weight.endswith(".weight") else str(node.name)


def _outputs(model: onnx.ModelProto, images: torch.Tensor, batch: ExampleBatch) -> list[torch.Tensor]:
    """The outputs of a graph for images, call after call."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    calls = (session.run(None, {name: arguments[0].numpy()}) for arguments in steps(images, batch))
    return [torch.from_numpy(array) for outputs in calls for array in outputs]


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a graph, to change it."""
    copy = type(model)()
    copy.CopyFrom(model)
    return copy


@dataclass(frozen=True, eq=False, kw_only=True)
class Int8Graph:
    """An ONNX graph with the ranges of its tensors on calibration images; `quantised` makes int8 graphs of it."""

    model: onnx.ModelProto
    ranges: Any
    reduce_range: bool

    @classmethod
    def calibrated(
        cls, model: onnx.ModelProto, images: torch.Tensor, batch: ExampleBatch, *, reduce_range: bool
    ) -> Int8Graph:
        """Run the graph on images and record the range of every tensor."""
        from onnxruntime.quantization.calibrate import CalibrationDataReader, create_calibrator

        # The range of a tensor is the mean over such batches of the smallest and the largest value: over all images, a
        # single unusual one would widen it for all; over single images, it would cut off too much of many.
        name, calls = model.graph.input[0].name, steps(images, batch, RANGE_IMAGES)

        class Reader(CalibrationDataReader):  # type: ignore[misc]  # the library has no types
            def get_next(self) -> dict[str, Any] | None:
                return next(({name: arguments[0].numpy()} for arguments in calls), None)

        with tempfile.TemporaryDirectory(prefix="strucspars-int8-") as folder, without_chatter():
            source = Path(folder) / "network.onnx"
            source.write_bytes(model.SerializeToString())
            calibrator = create_calibrator(
                source,
                _op_types(),
                augmented_model_path=str(Path(folder) / "augmented.onnx"),
                extra_options={"moving_average": True},
            )
            calibrator.collect_data(Reader())
            ranges = calibrator.compute_data()
        for tensor, found in ranges.items():
            if not np.isfinite(found.range_value).all():
                raise ValueError(
                    f"quantize: {tensor!r} of the graph is NaN or infinite for the images to calibrate with, so it has "
                    "no range; look for the layer in which the activations overflow"
                )
        return cls(model=model, ranges=ranges, reduce_range=reduce_range)

    def quantised(self, *, float32_layers: Iterable[str] = (), only: str | None = None) -> onnx.ModelProto:
        """The int8 graph, with some layers left in float32, or with only one in int8."""
        import onnx
        from onnxruntime.quantization import QuantType
        from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

        with without_chatter():
            quantizer = QDQQuantizer(
                copy_of(self.model),
                True,  # a scale per output channel of a weight
                self.reduce_range,
                QuantType.QInt8,
                QuantType.QUInt8,
                self.ranges,
                [] if only is None else self.layers[only],
                [node for layer in float32_layers for node in self.layers[layer]],
                _op_types(),
                # Scores of classes in 8 bits would often be equal, and clipped where the images are easy.
                {"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]},
            )
            quantizer.quantize_model()
            # The writers of files look at the ranks of tensors.
            quantised: onnx.ModelProto = onnx.shape_inference.infer_shapes(quantizer.model.model)
        quantised.metadata_props.add(key=PRECISION_KEY, value="int8")
        return quantised

    @cached_property
    def layers(self) -> dict[str, list[str]]:
        """The nodes of every layer with a weight, one per call, by the name of the layer."""
        nodes: dict[str, list[str]] = {}
        for node in self._weighted:
            nodes.setdefault(_layer(node), []).append(node.name)
        return nodes

    @cached_property
    def macs(self) -> dict[str, int]:
        """Multiply-accumulates of every layer for one image."""
        graph = self.model.graph
        sizes = {
            value.name: [size.dim_value or 1 for size in value.type.tensor_type.shape.dim]
            for value in (*graph.input, *graph.value_info, *graph.output)
        }
        weights = {each.name: math.prod(each.dims) for each in graph.initializer}
        counts = dict.fromkeys(self.layers, 0)
        for node in self._weighted:
            # A transposed convolution applies its weight at every pixel of its input, others at those of their output.
            # A linear layer's output has the batch first, then maybe positions.
            pixels = sizes[node.input[0] if node.op_type == "ConvTranspose" else node.output[0]]
            positions = pixels[1:-1] if node.op_type in ("Gemm", "MatMul") else pixels[2:]
            counts[_layer(node)] += weights[node.input[1]] * math.prod(positions)
        return counts

    def macs_fraction(self, layers: Iterable[str]) -> float:
        """The share of these layers in all multiply-accumulates."""
        return sum(self.macs[layer] for layer in layers) / max(sum(self.macs.values()), 1)

    def by_harm(self, images: torch.Tensor, batch: ExampleBatch) -> list[str]:
        """The layers by the error that each causes alone in int8, largest first."""
        expected = _outputs(self.model, images, batch)

        def harm(layer: str) -> float:
            found = _outputs(self.quantised(only=layer), images, batch)
            return sum(float((ours - theirs).square().sum()) for ours, theirs in zip(found, expected, strict=True))

        return sorted(self.layers, key=harm, reverse=True)

    @cached_property
    def _weighted(self) -> list[onnx.NodeProto]:
        weights = {each.name for each in self.model.graph.initializer}
        return [node for node in self.model.graph.node if node.op_type in WEIGHTED and node.input[1] in weights]
