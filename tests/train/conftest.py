"""What the tests of the pipeline share: a recipe of a second, and what a run folder comes to but for the clock."""

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from strucspars.io.arrays import load_arrays
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder

HERE = Path(__file__).parent
WALL_CLOCK = {"seconds", "train_seconds", "solver_seconds"}

# Recipes name networks as `small_networks:plain`.
sys.path.append(str(HERE))


@pytest.fixture(scope="session")
def small_recipe() -> Callable[..., Recipe]:
    """`small_recipe("stage1.epochs=3", ...)`: a run of a second, with overrides."""

    def recipe(*overrides: str) -> Recipe:
        return read_recipe(HERE / "small_recipe.yaml", overrides)

    return recipe


@pytest.fixture(scope="session")
def stop_after() -> Callable[[int], Callable[[], bool]]:
    """`stop_after(7)`: says stop from the seventh time it is asked on: after every step, and after every epoch."""

    def question(questions: int) -> Callable[[], bool]:
        asked = itertools.count(1)
        return lambda: next(asked) >= questions

    return question


@pytest.fixture(scope="session")
def assert_same_outcome() -> Callable[..., None]:
    """`assert_same_outcome(one, other)`: two run folders hold the same to the last bit, but for wall-clock times.

    Runs in threads share a generator: with `shared_generator=True` its state does not count.
    """

    def compare(one: Path, other: Path, *, shared_generator: bool = False) -> None:
        left, right = outcome(RunFolder(one)), outcome(RunFolder(other))
        if shared_generator:
            for found in (left, right):
                del found["checkpoint"]["random_states"]
        assert_identical(left, right, "run")

    return compare


def outcome(folder: RunFolder) -> dict[str, Any]:
    """Everything that a finished run has to say."""
    with safe_open(folder.model_path, framework="pt") as file:
        model = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        metadata = dict(sorted(file.metadata().items()))
    arrays = [*sorted(folder.dynamics.iterdir()), *sorted(folder.importance.iterdir())]
    return {
        "recipe": folder.recipe_path.read_text(),
        "plan": folder.plan_path.read_text() if folder.plan_path.exists() else None,
        "metrics": [timeless(row) for row in folder.metrics()],
        "summary": timeless(json.loads(folder.summary_json_path.read_text())),
        "model": model,
        "metadata": metadata,
        "checkpoint": folder.load_checkpoint(),
        "arrays": {path.name: load_arrays(path) for path in arrays},
    }


def timeless(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in WALL_CLOCK}


def assert_identical(one: Any, other: Any, where: str) -> None:
    assert type(one) is type(other), where
    if isinstance(one, Mapping):
        assert list(one) == list(other), where
        for key in one:
            assert_identical(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_identical(left, right, f"{where}[{place}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), f"{where}: {one} and {other}"
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, where
        np.testing.assert_array_equal(one, other, where)
    else:
        assert one == other, where
