"""`export_openvino`: OpenVINO's two files, checked in OpenVINO before they get their names."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strucspars.cost.counting import ExampleInputs
from strucspars.export.agreement import Run
from strucspars.export.checked import SUFFIXES, ExportReport, write_checked
from strucspars.export.example_batch import Arguments
from strucspars.export.onnx import count_axes_from_the_end_, onnx_model, write_onnx
from strucspars.export.program import inference_program, new_tensors_on_cpu
from strucspars.export.quiet import first_line, without_chatter
from strucspars.io.files import check_companion, followed

if TYPE_CHECKING:
    import onnx

SUFFIX = SUFFIXES["openvino"]
# With narrower groups a small network takes more than twice as long (docs/decisions/0014-inference.md).
WIDEN_GROUPS_BELOW = 16
# On processors with bfloat16 units OpenVINO would else compute in that.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"}


@new_tensors_on_cpu()
def export_openvino(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: ExampleInputs,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    widen_groups_below: int | None = None,
) -> ExportReport:
    """Write a network as OpenVINO's `.xml` file with its `.bin` file, in full precision.

    The network is folded first. The files are run in OpenVINO on random inputs and compared with the network before
    they appear under their names; on any failure nothing is left, and files that were there before stay. Needs
    OpenVINO: `pip install 'strucspars[openvino]'`.

    Args:
        model: converted, masked or dense, or a graph that `fold` has made; on any device, and it stays as it is.
        path: the file to write, with `.xml` at its end.
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`, all tensors.
        input_names: one per input; None: the names of the arguments of `forward`, or "input_1", "input_2" and so on
            where `*args` takes some of them.
        output_names: one per output; None: "output", "output_1" and so on, or the keys of a dictionary of tensors.
        dynamic_batch: let the batch have any size. It is the first axis of the first input, and of all that are as
            long there.
        widen_groups_below: run groups of fewer channels as wider ones, as in `fold`. None: 16, below which OpenVINO
            is slow; a graph that is folded already stays as it is.

    Raises:
        ImportError: OpenVINO is not installed.
        ValueError: the network cannot be exported, or OpenVINO computes something else.
        OSError: the files cannot be written.

    >>> export_openvino(nn.Conv2d(3, 8, 3), "network.onnx", torch.randn(2, 3, 8, 8))
    Traceback (most recent call last):
        ...
    ValueError: OpenVINO's files end in .xml and .bin, got network.onnx; write to network.xml
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        right = path.parent / f"{path.stem or 'network'}{SUFFIX}"
        raise ValueError(f"OpenVINO's files end in .xml and .bin, got {path}; write to {right}")
    openvino = openvino_module()
    # Before the work, not after it.
    check_companion(followed(path), weights_path(followed(path)))
    program = inference_program(
        model,
        example_inputs,
        dynamic_batch=dynamic_batch,
        widen_groups_below=widen_groups_below,
        usual_group_width=WIDEN_GROUPS_BELOW,
        input_names=input_names,
        output_names=output_names,
    )
    proto = onnx_model(program)
    # OpenVINO 2026.4 moves a constant Gather along axis 1 into the dense convolution after it, and gets the order of
    # the channels wrong, the inverse instead. It does not look for axes counted from the end, which cost the same.
    count_axes_from_the_end_(proto.graph)
    return write_checked(
        program,
        path,
        format="openvino",
        runtime=f"OpenVINO {openvino.__version__.partition('-')[0]}",
        write=lambda unfinished: _write(proto, unfinished),
        runner=openvino_runner,
    )


def weights_path(path: Path) -> Path:
    """The file that OpenVINO keeps the weights of an `.xml` file in.

    >>> weights_path(Path("network.xml")).name
    'network.bin'
    """
    return path.parent / f"{path.stem}.bin"


def openvino_module() -> Any:
    """OpenVINO, or an `ImportError` that says how to get it."""
    try:
        import openvino
    except ImportError as error:
        raise ImportError("OpenVINO is missing: pip install 'strucspars[openvino]'") from error
    return openvino


def _write(proto: onnx.ModelProto, path: Path) -> None:
    openvino = openvino_module()
    with tempfile.TemporaryDirectory() as folder, without_chatter():
        write_onnx(proto, Path(folder) / "network.onnx")
        try:
            # Not openvino.convert_model, which may report its use over the network.
            model = openvino.Core().read_model(Path(folder) / "network.onnx")
        except RuntimeError as error:
            raise ValueError(f"OpenVINO cannot read the network: {_reasons(error)}; try export_onnx") from error
        try:
            openvino.save_model(model, path, compress_to_fp16=False)
        except RuntimeError as error:
            raise OSError(
                f"OpenVINO cannot write {path}: {first_line(error)}; see to that, or choose another path"
            ) from error


def _reasons(error: RuntimeError) -> str:
    """What OpenVINO has to say, of its list of places in its source that each end in a colon."""
    lines = dict.fromkeys(line.strip("- ") for line in str(error).splitlines())
    reasons = [line for line in lines if line and not line.endswith(":")]
    return "; ".join(reasons).rstrip(".") or first_line(error)


def openvino_runner(path: Path) -> Run:
    """OpenVINO with the files of a network, on the CPU, in full precision."""
    openvino = openvino_module()
    with without_chatter():
        try:
            compiled = openvino.Core().compile_model(openvino.Core().read_model(path), "CPU", EXACT)
        except RuntimeError as error:
            raise ValueError(f"OpenVINO cannot run the network: {_reasons(error)}; try export_onnx") from error

    def run(arguments: Arguments) -> list[torch.Tensor]:
        outputs = compiled([tensor.numpy() for tensor in arguments])
        return [torch.from_numpy(outputs[place].copy()) for place in range(len(compiled.outputs))]

    return run
