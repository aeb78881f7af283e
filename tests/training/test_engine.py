import os
from pathlib import Path

import pytest

from strucspars.training.engine import Engine
from strucspars.training.recipe import EngineRecipe


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
