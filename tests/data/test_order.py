from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from strucspars.data.batches import EpochOrder


def order(**changes: Any) -> EpochOrder:
    return EpochOrder(**{"count": 10, "batch_size": 4, "shuffled": True, "seed": 0, **changes})


sizes = {"count": st.integers(1, 40), "batch_size": st.integers(1, 7), "world_size": st.integers(1, 4)}


@given(**sizes, shuffled=st.booleans(), epoch=st.integers(0, 3))
def test_all_processes_together_see_what_one_would_step_by_step(
    count: int, batch_size: int, world_size: int, shuffled: bool, epoch: int
) -> None:
    alone = order(count=count, batch_size=batch_size * world_size, shuffled=shuffled)
    ranks = [
        order(count=count, batch_size=batch_size, shuffled=shuffled, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    dealt = torch.stack([rank.indices(epoch) for rank in ranks], dim=2).flatten(1)
    assert torch.equal(dealt, alone.indices(epoch))
    assert torch.equal(torch.stack([rank.valid() for rank in ranks], dim=2).flatten(1), alone.valid())


@given(**sizes)
def test_an_evaluation_counts_every_image_once(count: int, batch_size: int, world_size: int) -> None:
    ranks = [
        order(count=count, batch_size=batch_size, shuffled=False, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    counted = torch.cat([rank.indices(0)[rank.valid()] for rank in ranks])
    assert counted.sort().values.tolist() == list(range(count))
    for rank in ranks:
        assert not rank.indices(0)[~rank.valid()].any()


@given(**sizes, epoch=st.integers(0, 3))
def test_a_shuffled_epoch_has_every_image_and_goes_on_from_its_beginning(
    count: int, batch_size: int, world_size: int, epoch: int
) -> None:
    whole = order(count=count, batch_size=batch_size * world_size)
    places = whole.indices(epoch).flatten()
    assert places[:count].sort().values.tolist() == list(range(count))
    assert torch.equal(places[count:], places[: len(places) - count])
    assert whole.valid().all()
    assert len(places) - count < batch_size * world_size


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [order(count=100, batch_size=100, seed=seed).indices(epoch)[0] for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(indices.tolist()) for indices in orders}) == 4
    assert torch.equal(order(seed=3).indices(5), order(seed=3).indices(5))


def test_the_global_random_state_neither_matters_nor_changes() -> None:
    torch.manual_seed(1)
    first, state = order().indices(0), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(order().indices(0), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
