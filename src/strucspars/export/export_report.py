"""What an export came to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strucspars.export.agreement import Agreement

Format = Literal["onnx", "openvino", "torch"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """A file that was written, and how closely it agrees with the network. `str()` of it is a short text.

    Attributes:
        path: the file.
        format: what kind it is.
        runtime: name and version of what it was checked in.
        nbytes: its size, with that of its companions.
        num_gathers: channel shuffles that folding left in it.
        gathered_bytes: what those copy for the example inputs.
        agreement: of the runtime with the network.

    >>> agreement = Agreement(
    ...     batch_sizes=(2, 1), max_relative_error=2e-7, tolerance=1e-4, num_outputs=1, num_winners=3
    ... )
    >>> print(ExportReport(path=Path("model.onnx"), format="onnx", runtime="ONNX Runtime 1.31.0", nbytes=12345,
    ...                    num_gathers=1, gathered_bytes=4096, agreement=agreement))
    model.onnx  12,345 bytes
    gathers     1, 4,096 bytes
    checked in  ONNX Runtime 1.31.0, batch sizes 2 and 1
    off by      2.0e-07 of the largest output; 1e-04 is allowed
    winners     the same in 3 rows
    """

    path: Path
    format: Format
    runtime: str
    nbytes: int
    num_gathers: int
    gathered_bytes: int
    agreement: Agreement

    def __str__(self) -> str:
        found = self.agreement
        sizes = " and ".join(str(size) for size in found.batch_sizes)
        gathers = f"{self.num_gathers}, {self.gathered_bytes:,} bytes" if self.num_gathers else "none"
        rows = [
            (self.path.name, f"{self.nbytes:,} bytes"),
            ("gathers", gathers),
            ("checked in", f"{self.runtime}, batch size{'s' if len(found.batch_sizes) > 1 else ''} {sizes}"),
            ("off by", f"{found.max_relative_error:.1e} of the largest output; {found.tolerance:.0e} is allowed"),
        ]
        if found.num_winners:
            rows.append(("winners", f"the same in {found.num_winners} row{'s' if found.num_winners > 1 else ''}"))
        width = max(len(title) for title, _ in rows)
        return "\n".join(f"{title:<{width}}  {text}" for title, text in rows)
