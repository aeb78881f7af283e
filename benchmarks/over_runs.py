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
    """Parse the command line, measure every run it names, and add what came out to the file.

    Args:
        measure: gives the row of a run folder, given the folder of CIFAR-10.
        text: for `--help`.
        packages: whose versions matter.
        out: where the JSON goes unless someone says otherwise.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the folder of CIFAR-10")
    parser.add_argument("runs", type=Path, nargs="+", help="finished runs")
    parser.add_argument("--out", type=Path, default=out, help="rows of other runs that are in it stay")
    options = parser.parse_args()
    environment = describe(packages)
    # Recorded commands name no folder of this machine.
    names = " ".join(run.name for run in options.runs)
    environment["command"] = f"{str(environment['command']).split(options.data)[0]}CIFAR10 {names}"
    rows = []
    for run in options.runs:
        rows.append(measure(run, options.data))
        print(json.dumps(rows[-1]), flush=True)
    sittings = with_sitting(read_sittings(options.out), {"environment": environment, "rows": rows})
    options.out.write_text(json.dumps({"sittings": sittings}, indent=2) + "\n")
    print(f"written: {options.out}")


def read_sittings(path: Path) -> list[dict[str, Any]]:
    """What was measured before, each time with its environment; nothing where there is no such file."""
    sittings: list[dict[str, Any]] = json.loads(path.read_text())["sittings"] if path.is_file() else []
    return sittings


def with_sitting(sittings: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The former sittings without the runs that were measured again, and the new one."""
    again = {row["run"] for row in new["rows"]}
    kept = [each | {"rows": [row for row in each["rows"] if row["run"] not in again]} for each in sittings]
    return [each for each in kept if each["rows"]] + [new]


def measured_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of all sittings, by name of the run."""
    return sorted((row for each in read_sittings(path) for row in each["rows"]), key=lambda row: str(row["run"]))
