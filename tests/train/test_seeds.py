import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run import derived_seed
from strucspars.train.steps import TrainingStep

Recipes = Callable[..., Recipe]
STEPS = 6
SLIMMING = ("kind=slimming", "model.name=cifar-resnet8")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the batches that were trained on, in order."""
    digests: list[str] = []
    train: Any = TrainingStep.__call__

    def noted(self: TrainingStep, images: torch.Tensor, *others: torch.Tensor | None) -> None:
        digests.append(hashlib.sha256(images.numpy().tobytes()).hexdigest())
        train(self, images, *others)

    monkeypatch.setattr(TrainingStep, "__call__", noted)
    return digests


@given(st.integers(0, 2**63), st.text(max_size=20), st.integers(0, 10_000))
def test_a_seed_is_one_that_torch_takes_and_always_the_same(seed: int, purpose: str, number: int) -> None:
    derived = derived_seed(seed, purpose, number)
    assert 0 <= derived < 2**63
    torch.Generator().manual_seed(derived)
    assert derived == derived_seed(seed, purpose, number)


def test_runs_purposes_and_epochs_have_seeds_of_their_own() -> None:
    purposes = ("weights", "fresh weights of the ablation", "sparsify epoch", "finetune epoch")
    seeds = [derived_seed(seed, purpose, epoch) for seed in range(5) for purpose in purposes for epoch in range(200)]
    assert len(set(seeds)) == len(seeds)
    # The low halves too: some generators look at no more.
    assert len({seed % 2**32 for seed in seeds}) > 0.99 * len(seeds)


def test_a_seed_does_not_change_from_version_to_version() -> None:
    assert derived_seed(0, "weights") == 8056890350693258407
    assert derived_seed(7, "sparsify epoch", 3) == 4333414965687910312


@pytest.mark.parametrize("options", [(), SLIMMING, ("finetune.recalibrate_bn=true",)])
def test_no_stage_repeats_the_batches_of_another(
    options: tuple[str, ...], small_recipe: Recipes, tmp_path: Path, seen: list[str]
) -> None:
    run_pipeline(small_recipe(*options), tmp_path / "run")
    assert len(seen) == len(set(seen)) == 4 * STEPS


def test_variants_of_one_seed_see_the_same_batches(small_recipe: Recipes, tmp_path: Path, seen: list[str]) -> None:
    run_pipeline(small_recipe(), tmp_path / "run")
    whole = seen.copy()
    second_stage = (f"sparsify.from_run={tmp_path / 'run'}", "finetune.ablation=random")
    for options, batches in ((SLIMMING, whole), (second_stage, whole[2 * STEPS :])):
        seen.clear()
        run_pipeline(small_recipe(*options), tmp_path / options[0][:5])
        assert seen == batches
    # A dense run has one stage, whose epochs are the first.
    seen.clear()
    run_pipeline(small_recipe("kind=dense", "stage2.epochs=4"), tmp_path / "dense")
    assert seen == whole
