"""What a process takes from a checkpoint of the middle of an epoch, whoever wrote it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strucspars.train.stage import in_present_form, own_random_states, own_sums


def process(rank: int, of: int) -> Any:
    return SimpleNamespace(rank=rank, world_size=of)


def test_as_many_processes_take_what_was_theirs() -> None:
    sums = torch.tensor([[1.0, 10.0], [3.0, 20.0]], dtype=torch.float64)
    states = [[torch.Generator().manual_seed(seed).get_state()] for seed in range(2)]
    for rank in range(2):
        assert torch.equal(own_sums(sums, process(rank, 2)), sums[rank])
        assert torch.equal(own_random_states(states, process(rank, 2))[0], states[rank][0])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_another_number_of_processes_goes_on_from_the_same_loss_and_right_answers(before: int, after: int) -> None:
    sums = torch.tensor([[1.0, 10.0], [3.0, 20.0], [5.0, 60.0], [7.0, 30.0]], dtype=torch.float64)[:before]
    shares = torch.stack([own_sums(sums, process(rank, after)) for rank in range(after)])
    # An epoch's loss is the mean over its processes; its right answers are those of all.
    assert shares[:, 0].mean() == sums[:, 0].mean()
    assert shares[:, 1].sum() == sums[:, 1].sum()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_processes_takes_no_random_state(before: int, after: int) -> None:
    states = [[torch.Generator().manual_seed(seed).get_state()] for seed in range(before)]
    assert [own_random_states(states, process(rank, after)) for rank in range(after)] == [[]] * after


@pytest.mark.parametrize("processes", [1, 2])
def test_of_the_first_version_every_process_takes_the_mean_sums(processes: int) -> None:
    state = torch.Generator().manual_seed(7).get_state()
    older = {"version": 1, "stage": "sparsify", "sums": torch.tensor([2.0, 30.0]), "random_states": [state]}
    for rank in range(processes):
        engine = process(rank, processes)
        present = in_present_form(older, engine)
        assert own_sums(present["sums"], engine).tolist() == [2.0, 30.0]
        assert len(own_random_states(present["random_states"], engine)) == (1 if processes == 1 else 0)
        assert (present["stage"], present["data_epochs_before"]) == ("sparsify", 0)


def test_of_this_version_nothing_is_changed() -> None:
    present = {"version": 2, "data_epochs_before": 5}
    assert in_present_form(present, process(0, 1)) is present


def test_what_is_no_random_state_is_noticed_before_it_is_used() -> None:
    before = torch.get_rng_state()
    with pytest.raises((RuntimeError, TypeError)):
        own_random_states([[torch.zeros(3, dtype=torch.uint8)]], process(0, 1))
    assert torch.equal(torch.get_rng_state(), before)
