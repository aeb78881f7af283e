"""Names and shapes of all tensors that are kept: the one place to look at when their layout is changed on purpose."""

from typing import Any

import torch
from golden_networks import images, residual
from golden_record import Record, shapes
from golden_subject import ss
from safetensors import safe_open


def test_networks_keep_the_recorded_tensors(golden: Record) -> None:
    plan = ss.one_shot_plan(residual(), target=0.5, example_inputs=images())
    found = {
        "converted": ss.convert_(residual(), plan).state_dict(),
        "masked": ss.mask_(residual(), plan).state_dict(),
    }
    golden.check("state-of-networks", {name: shapes(state) for name, state in found.items()})


def test_a_sparsifier_keeps_the_recorded_state(golden: Record) -> None:
    sparsifier = ss.Sparsifier(residual(), ss.SparsifyConfig(target=0.4, epochs=3, lambda_warmup=0))
    sparsifier.end_epoch()
    golden.check("state-of-a-sparsifier", kinds(sparsifier.state_dict()))


def test_finished_runs_keep_the_recorded_tensors_and_metadata(workplace: Any, golden: Record) -> None:
    found = {}
    for name in ("structured", "slimming", "dense"):
        with safe_open(workplace.run_folder(name) / "model.safetensors", framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a mapping
            found[name] = {"metadata": sorted(file.metadata()), "tensors": shapes(tensors)}
    golden.check("state-of-runs", found)


def kinds(value: Any) -> Any:
    """A state with the type of each value in its place."""
    if isinstance(value, dict):
        return {str(key): kinds(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        return shapes({"": value})[""]
    return type(value).__name__
