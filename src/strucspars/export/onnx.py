"""ONNX files, checked in ONNX Runtime, and `OnnxRunner` to use them."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt
import torch

from strucspars.core.checks import checked_at_least
from strucspars.export.program import (
    GATHERS_KEY,
    INDEPENDENT_KEY,
    Arguments,
    Exporter,
    Inference,
    InferenceProgram,
    first_line,
    optional_module,
    without_chatter,
)

if TYPE_CHECKING:
    import onnx

BATCH_AXIS = "batch"
# Limit of a protobuf message; the weights of larger models go into a second file.
LARGEST_MESSAGE = 2**31 - 2**20

Array = npt.NDArray[Any]


class GraphExporter(Exporter):
    """A format whose files are made from an ONNX graph. Such formats have int8 files too (`export.int8`).

    `int8_group_width` is `group_width` in int8, where other kernels run.
    """

    int8_group_width: int = 1

    def write(self, program: InferenceProgram, path: Path) -> None:
        """Write the file."""
        self.write_graph(onnx_model(program), path)

    @abstractmethod
    def write_graph(self, model: onnx.ModelProto, path: Path) -> None:
        """Write an ONNX graph, in float32 or int8, as this format; the graph may change."""


@final
class OnnxExporter(GraphExporter):
    """One `.onnx` file, in which every remaining shuffle is one Gather; weights above 2 GB are in a second file."""

    suffix = ".onnx"
    # The fast convolutions of ONNX Runtime work on blocks of 16 channels.
    group_width = 16
    # In int8 it computes group by group, and pays for each call (docs/how-to/int8.md).
    int8_group_width = 32

    def runtime(self) -> str:
        """The version of ONNX Runtime."""
        versions = [optional_module(name, extra="onnx").__version__ for name in ("onnx", "onnxscript", "onnxruntime")]
        return f"ONNX Runtime {versions[-1]}"

    def write_graph(self, model: onnx.ModelProto, path: Path) -> None:
        """Write the file."""
        keep_paddings_(model.graph)
        write_onnx(model, path)

    def load(self, path: Path) -> Inference:
        """The network on one core, all samples of a batch at once."""
        runner = OnnxRunner(path, threads=1)
        runner.images_per_call = None

        def run(arguments: Arguments) -> list[torch.Tensor]:
            return [torch.from_numpy(array) for array in runner(*(tensor.numpy() for tensor in arguments))]

        return run


def onnx_model(program: InferenceProgram) -> onnx.ModelProto:
    """The ONNX form of a network, with its names and metadata."""
    try:
        with without_chatter():
            written = torch.onnx.export(program.exported, dynamo=True, verbose=False, optimize=True)
            assert written is not None
            model: onnx.ModelProto = written.model_proto
    # Operations without an ONNX form raise errors of many kinds, without a common base.
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(f"the network cannot be written as ONNX: {first_line(cause)}; try format='torch'") from error
    rename_values_(model.graph, program.input_names, program.output_names)
    name_batch_axis_(model.graph, program.batch.is_batched)
    drop_origins_(model)
    for key, value in program.metadata.items():
        model.metadata_props.add(key=key, value=value)
    return model


def write_onnx(model: onnx.ModelProto, path: Path) -> None:
    """Write an ONNX model; one too large for a single message gets a second file for its weights."""
    import onnx

    if model.ByteSize() <= LARGEST_MESSAGE:
        path.write_bytes(model.SerializeToString())
    else:
        onnx.save_model(model, path, save_as_external_data=True, location=f"{path.name}.data")


def rename_values_(graph: onnx.GraphProto, input_names: Sequence[str], output_names: Sequence[str]) -> None:
    """Give the inputs and outputs these names; inner values that have one of them already get another."""
    chosen = dict(zip([value.name for value in graph.input], input_names, strict=True))
    chosen |= dict(zip([value.name for value in graph.output], output_names, strict=True))
    wanted, taken = set(chosen.values()), set(_value_names(graph)) | set(chosen.values())
    for name in sorted((wanted & set(_value_names(graph))) - set(chosen)):
        chosen[name] = next(free for number in range(1, len(taken) + 2) if (free := f"{name}_{number}") not in taken)
        taken.add(chosen[name])
    for each in _graphs(graph):
        for value in (*each.input, *each.output, *each.value_info, *each.initializer):
            value.name = chosen.get(value.name, value.name)
        for node in each.node:
            for names in (node.input, node.output):
                names[:] = [chosen.get(name, name) for name in names]


def name_batch_axis_(graph: onnx.GraphProto, is_batched: Sequence[bool]) -> None:
    """Name the varying first axis of the inputs, and every size that depends on it, `BATCH_AXIS`."""
    symbols = {
        value.type.tensor_type.shape.dim[0].dim_param
        for value, batched in zip(graph.input, is_batched, strict=True)
        if batched
    }
    whole_word = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in sorted(symbols) if symbol) or r"(?!)")
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = whole_word.sub(BATCH_AXIS, size.dim_param)


def keep_paddings_(graph: onnx.GraphProto) -> None:
    """Give every maximum pooling right after a padding a second, unused output, the indices: the same function.

    ONNX Runtime 1.31 moves a padding with any value into a pooling that has no second output. Inside the pooling,
    padded entries are ignored, while padded zeros are the maximum of negative numbers.
    """
    padded = {node.output[0] for node in graph.node if node.op_type == "Pad"}
    for node in graph.node:
        if node.op_type == "MaxPool" and node.input[0] in padded and len(node.output) == 1:
            node.output.append(f"{node.output[0]}_indices")


def drop_origins_(model: onnx.ModelProto) -> None:
    """Remove what the exporter notes about every value: code, and folders of the machine that exports."""
    del model.graph.metadata_props[:]
    for graph in _graphs(model.graph):
        for item in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del item.metadata_props[:]
            item.doc_string = ""


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and all graphs inside its nodes: branches and loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                yield from _graphs(inner)


def _value_names(graph: onnx.GraphProto) -> Iterator[str]:
    for each in _graphs(graph):
        yield from (value.name for value in (*each.input, *each.initializer))
        for node in each.node:
            yield from (name for name in node.output if name)


@final
class OnnxRunner:
    """An exported ONNX file in ONNX Runtime, on the CPU.

    If gathers remain, a batch is computed image by image, because gathers of a whole batch exceed the caches and take
    longer (`results/inference.md`). Otherwise, and for networks whose samples depend on each other, it is computed at
    once; the export has tested which is the case.

    Args:
        threads: that one image may use; None: one per core.
        images_per_call: how many images to give to ONNX Runtime at a time; None: one if the file has gathers, else all.

    >>> import strucspars as ss, tempfile, torch
    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = ss.export(model, f"{folder}/network.onnx", example_inputs=torch.randn(1, 3, 8, 8))
    ...     run = OnnxRunner(report.path, threads=1)
    >>> (features,) = run(np.zeros((5, 3, 8, 8), np.float32))
    >>> features.shape
    (5, 8, 6, 6)
    >>> run(np.zeros((5, 3, 8, 8)))
    Traceback (most recent call last):
    ValueError: input 'input' must be float32 of shape (batch, 3, 8, 8), got float64 of shape (5, 3, 8, 8)
    """

    def __init__(
        self, path: str | os.PathLike[str], *, threads: int | None = None, images_per_call: int | None = None
    ) -> None:
        self._path = Path(path)
        onnxruntime = optional_module("onnxruntime", extra="onnx")
        if not self._path.is_file():
            raise FileNotFoundError(f"there is no file {path}; strucspars.export writes one")
        options = onnxruntime.SessionOptions()
        # Errors are raised, so they need no log line.
        options.log_severity_level = 4
        if threads is not None:
            options.intra_op_num_threads = checked_at_least("threads", threads, 1)
        try:
            self._session = onnxruntime.InferenceSession(self._path, options, providers=["CPUExecutionProvider"])
        # The library's errors have no other common base.
        except Exception as error:
            raise ValueError(f"ONNX Runtime cannot read {path}: {first_line(error)}") from error
        metadata = self._session.get_modelmeta().custom_metadata_map
        if images_per_call is not None:
            checked_at_least("images_per_call", images_per_call, 1)
        elif metadata.get(GATHERS_KEY, "0") != "0":
            images_per_call = 1
        self.images_per_call = images_per_call
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._can_be_split = metadata.get(INDEPENDENT_KEY) == "true"

    def __call__(self, *inputs: npt.ArrayLike) -> tuple[Array, ...]:
        """The outputs for a batch; inputs in the order of the file."""
        arrays = self._checked_inputs(inputs)
        batched = {name for name, value in self._inputs.items() if value.shape and value.shape[0] == BATCH_AXIS}
        size = max((len(arrays[name]) for name in batched), default=0)
        step = self.images_per_call
        if step is None or not self._can_be_split or size <= step:
            return tuple(self._run(arrays))
        parts = [
            self._run({name: array[start:][:step] if name in batched else array for name, array in arrays.items()})
            for start in range(0, size, step)
        ]
        return tuple(np.concatenate(outputs) for outputs in zip(*parts, strict=True))

    def _checked_inputs(self, inputs: Sequence[npt.ArrayLike]) -> dict[str, Array]:
        if len(inputs) != len(self._inputs):
            names = ", ".join(self._inputs)
            raise ValueError(f"the network takes {len(self._inputs)} inputs ({names}), not {len(inputs)}")
        arrays: dict[str, Array] = dict(zip(self._inputs, map(np.asarray, inputs), strict=True))
        sizes: dict[str, int] = {}
        for name, value in self._inputs.items():
            array, dtype = arrays[name], _DTYPES.get(value.type, value.type.removeprefix("tensor(").removesuffix(")"))
            # Axes with a name, such as "batch", have any length, but the same in all inputs.
            wanted = [sizes.get(size, size) for size in value.shape]
            fits = array.ndim == len(wanted) and all(
                length == size or not isinstance(size, int) for length, size in zip(array.shape, wanted, strict=True)
            )
            if array.dtype != dtype or not fits:
                shape = f"({', '.join(map(str, wanted))})"
                raise ValueError(
                    f"input {name!r} must be {dtype} of shape {shape}, got {array.dtype} of shape {array.shape}"
                )
            sizes |= {
                size: length for size, length in zip(value.shape, array.shape, strict=True) if isinstance(size, str)
            }
        return arrays

    def _run(self, arrays: dict[str, Array]) -> list[Array]:
        try:
            outputs: list[Array] = self._session.run(None, arrays)
        # The library's errors have no other common base.
        except Exception as error:
            raise RuntimeError(f"ONNX Runtime failed on {self._path}: {first_line(error)}") from error
        return outputs


# As ONNX Runtime calls them, where numpy has another name.
_DTYPES = {"tensor(float)": "float32", "tensor(double)": "float64"}
