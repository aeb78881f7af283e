"""Running an exported file in ONNX Runtime in the way that is fastest there."""

import os
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from strucspars.core.checks import checked_at_least
from strucspars.export.inference_program import GATHERS_KEY, INDEPENDENT_KEY
from strucspars.export.onnx_graph import BATCH_AXIS
from strucspars.export.quiet import first_line

Array = npt.NDArray[Any]


@final
class OnnxRunner:
    """A file of `export_onnx` in ONNX Runtime, on the CPU.

    A batch of many images goes image by image where gathers remain, and at once where none does: gathers of a whole
    batch leave the caches, and take longer than those of its images one after the other (`results/inference.md`). A
    network whose samples depend on each other always gets them at once; the export has tried that.

    Args:
        path: the file.
        threads: that one image may use; None: one per core.
        images_per_call: how many images to give to ONNX Runtime at a time; None: one if the file has gathers, else all.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: ONNX Runtime cannot read it, or an argument makes no sense.

    >>> import strucspars as ss, tempfile, torch
    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = ss.export_onnx(model, f"{folder}/network.onnx", torch.randn(1, 3, 8, 8))
    ...     run = OnnxRunner(report.path, threads=1)
    >>> (features,) = run(np.zeros((5, 3, 8, 8), np.float32))
    >>> features.shape
    (5, 8, 6, 6)
    """

    def __init__(
        self, path: str | os.PathLike[str], *, threads: int | None = None, images_per_call: int | None = None
    ) -> None:
        self._session = _session(Path(path), threads)
        metadata = self._session.get_modelmeta().custom_metadata_map
        gathers = metadata.get(GATHERS_KEY, "0")
        if images_per_call is not None:
            checked_at_least("images_per_call", images_per_call, 1)
        self.images_per_call = 1 if images_per_call is None and gathers != "0" else images_per_call
        self._inputs = {value.name: _has_batch(value) for value in self._session.get_inputs()}
        self._can_be_split = metadata.get(INDEPENDENT_KEY) == "true"

    def __call__(self, *inputs: npt.ArrayLike) -> tuple[Array, ...]:
        """The outputs for a batch; inputs in the order of the file's."""
        if len(inputs) != len(self._inputs):
            names = ", ".join(self._inputs)
            raise ValueError(f"the network takes {len(self._inputs)} inputs ({names}), not {len(inputs)}")
        arrays = dict(zip(self._inputs, map(np.asarray, inputs), strict=True))
        lengths = {len(array) for name, array in arrays.items() if self._inputs[name]}
        step = self.images_per_call
        if step is None or not self._can_be_split or len(lengths) != 1 or max(lengths) <= step:
            return tuple(self._session.run(None, arrays))
        parts = [self._session.run(None, self._part(arrays, start, step)) for start in range(0, max(lengths), step)]
        return tuple(np.concatenate(outputs) for outputs in zip(*parts, strict=True))

    def _part(self, arrays: dict[str, Array], start: int, step: int) -> dict[str, Array]:
        return {name: array[start : start + step] if self._inputs[name] else array for name, array in arrays.items()}


def _session(path: Path, threads: int | None) -> Any:
    import onnxruntime

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; export_onnx writes one")
    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = checked_at_least("threads", threads, 1)
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    # The library's errors share no base but this.
    except Exception as error:
        raise ValueError(f"ONNX Runtime cannot read {path}: {first_line(error)}") from error


def _has_batch(value: Any) -> bool:
    return bool(value.shape) and value.shape[0] == BATCH_AXIS
