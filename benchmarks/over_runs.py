"""The command line of measurements on recorded CIFAR-10 runs: data, run folders, and one row of JSON per run."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from environment import describe


def measure_runs(
    measure: Callable[[Path, str], dict[str, Any]], *, text: str | None, packages: Sequence[str], out: Path
) -> None:
    """Parse the command line, measure every run it names, write.

    Args:
        measure: gives the row of a run folder, given where CIFAR-10 lies.
        text: for `--help`.
        packages: whose versions matter.
        out: where the JSON goes unless someone says otherwise.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="where CIFAR-10 lies")
    parser.add_argument("runs", type=Path, nargs="+", help="finished runs")
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    environment = describe(packages)
    # Where the data lie is nobody's business.
    names = " ".join(run.name for run in options.runs)
    environment["command"] = f"{str(environment['command']).split(options.data)[0]}CIFAR10 {names}"
    rows = []
    for run in options.runs:
        rows.append(measure(run, options.data))
        print(json.dumps(rows[-1]), flush=True)
    options.out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=2) + "\n")
    print(f"written: {options.out}")
