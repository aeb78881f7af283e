"""One network in the forms that runtimes take: folded graph and files, each made once, when first needed."""

from functools import cached_property
from pathlib import Path
from typing import final

import torch
from torch import fx, nn

from strucspars.convert.folding.fold import fold
from strucspars.export.export_report import ExportReport
from strucspars.export.onnx_export import export_onnx
from strucspars.export.openvino_export import export_openvino
from strucspars.measure.folded import FoldReport, fold_report


@final
class InferenceForms:
    """A network's folded graph, and its files for other runtimes, as a user would export them.

    Args:
        model: in eval mode.
        example: one image.
        folder: of the files; it must be there, and belong to this network alone.
        widen_groups_below: run groups narrower than so many channels as wider ones, as `fold` does; None: as an
            export does by default.
    """

    def __init__(
        self, model: nn.Module, example: torch.Tensor, folder: Path, *, widen_groups_below: int | None = None
    ) -> None:
        self.model, self.example = model, example
        self._folder, self._widen_groups_below = folder, widen_groups_below

    @cached_property
    def folded(self) -> fx.GraphModule:
        """The inference graph."""
        return fold(self.model, self.example, widen_groups_below=self._widen_groups_below or 1)

    @cached_property
    def report(self) -> FoldReport:
        """What folding has left."""
        return fold_report(self.folded)

    @cached_property
    def onnx(self) -> ExportReport:
        """The network as an ONNX file of any batch size."""
        path = self._folder / "network.onnx"
        return export_onnx(self.model, path, self.example, widen_groups_below=self._widen_groups_below)

    @cached_property
    def openvino(self) -> ExportReport:
        """The network as OpenVINO's files, of any batch size."""
        path = self._folder / "network.xml"
        return export_openvino(self.model, path, self.example, widen_groups_below=self._widen_groups_below)
