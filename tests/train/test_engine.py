import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from lightning_fabric import Fabric

from strucspars.train.engine import Engine
from strucspars.train.recipe import EngineRecipe


def test_a_machine_that_merely_has_srun_is_not_told_to_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    # A warning would be an error here.
    assert Engine(EngineRecipe(device="cpu")).world_size == 1


@pytest.mark.parametrize("tasks", ["1", "4"])
def test_a_single_process_inside_a_job_of_slurm_computes_alone(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"JOB_NAME": "train", "JOB_ID": "17", "NTASKS": tasks, "PROCID": "1", "LOCALID": "1", "NODEID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    engine = Engine(EngineRecipe(device="cpu"))
    assert (engine.world_size, engine.rank, engine.is_first) == (1, 0, True)


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = MEETING | {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "17", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
SLURM |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
ALL_NAMES = {"TORCHELASTIC_RUN_ID", "NODE_RANK", *TORCHRUN, *SLURM}


class Waits(Exception):
    """This is where processes wait for each other."""


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], Engine]:
    """`one_of_two(variables)`: the engine where these and `WORLD_SIZE=2` are all that tells of other processes."""

    def launch(fabric: Fabric) -> None:
        raise Waits

    def engine(variables: Mapping[str, str]) -> Engine:
        for name in ALL_NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in ({"WORLD_SIZE": "2"} | dict(variables)).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(Fabric, "launch", launch)
        return Engine(EngineRecipe(device="cpu"))

    return engine


@pytest.mark.parametrize(
    "left",
    [{}, MEETING, {"RANK": "0"}, {"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}, SLURM | {"SLURM_JOB_NAME": "bash"}],
)
def test_a_process_whose_shell_merely_has_a_world_size_does_not_wait_for_others(
    left: Mapping[str, str], one_of_two: Callable[[Mapping[str, str]], Engine]
) -> None:
    words = (
        "WORLD_SIZE is 2, but this process was not started with others, .* start all with torchrun, or unset WORLD_SIZE"
    )
    with pytest.raises(ValueError, match=words):
        one_of_two(left)


@pytest.mark.parametrize(
    "started",
    [TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, SLURM, TORCHRUN, MEETING | {"NODE_RANK": "1"}],
    ids=["torchrun", "SLURM", "as torchrun does", "a machine each"],
)
def test_processes_that_were_started_together_wait_for_each_other(
    started: Mapping[str, str], one_of_two: Callable[[Mapping[str, str]], Engine]
) -> None:
    with pytest.raises(Waits):
        one_of_two(started)
