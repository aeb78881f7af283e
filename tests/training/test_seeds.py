import torch
from hypothesis import given
from hypothesis import strategies as st

from strucspars.training.seeds import derived_seed


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
