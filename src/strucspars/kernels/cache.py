"""What was measured on a GPU, kept for the next time."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from strucspars._version import __version__
from strucspars.io.files import read_text, user_cache, write_text
from strucspars.io.records import as_record, check_header, parse_json, to_json
from strucspars.kernels.tuning import Problem, Timed, Timer, timed_implementations

logger = logging.getLogger(__name__)

FORMAT: Mapping[str, str | int] = {"format": "strucspars-kernel-times", "format_version": 1}


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """The implementations of problems on one machine, by their signatures, the quickest first."""

    machine: str
    times: Mapping[str, tuple[Timed, ...]]


@final
class Tuner:
    """Times every different problem once, and keeps the times in a file for each GPU and set of versions."""

    def __init__(self, machine: str, timer: Timer) -> None:
        self._machine, self._timer = machine, timer
        key = hashlib.sha256(repr((__version__, torch.__version__, machine)).encode()).hexdigest()[:16]
        self._path = user_cache("kernels") / f"{key}.json"
        self._times = dict(_read(self._path))

    def timed(self, problem: Problem) -> tuple[Timed, ...]:
        """The implementations of a problem, the quickest first; none if nothing computes it."""
        key = problem.signature
        if key not in self._times:
            self._times[key] = tuple(timed_implementations(problem, self._timer))
            self._write()
        return self._times[key]

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            record = KernelTimes(machine=self._machine, times=self._times)
            write_text(self._path, to_json({**FORMAT, "machine": record.machine, "times": record.times}))
        except OSError as error:
            logger.warning("the times of kernels are not kept for the next time: %s", error)


def _read(path: Path) -> Mapping[str, tuple[Timed, ...]]:
    where = str(path)
    try:
        return as_record(KernelTimes, check_header(parse_json(read_text(path), where), where, **FORMAT), where).times
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("kernels are timed again, because the file of their times cannot be read: %s", error)
        return {}
