"""Networks put together at random: whatever meets whatever, folding keeps the function."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_networks import RandomNetwork, random_scales_

import strucspars as ss
from strucspars.cost.gathers import shuffles_in_pass


@settings(max_examples=60)
@given(st.integers(0, 1_000_000), st.sampled_from([1, 1, 2, 5]))
def test_folding_keeps_the_function_of_any_network(seed: int, widen_groups_below: int) -> None:
    torch.manual_seed(seed)
    model = RandomNetwork(seed)
    random_scales_(model.double())
    images = torch.randn(2, model.in_channels, 4, 4, dtype=torch.float64)
    folded = ss.fold(model.eval(), images, widen_groups_below=widen_groups_below)
    report = ss.fold_report(folded)
    assert report.untraced_reason == ""
    with torch.no_grad():
        torch.testing.assert_close(folded(images), model(images))
        if widen_groups_below == 1:
            unfolded_bytes = sum(shuffle.nbytes for shuffle in shuffles_in_pass(model, (images,)))
            assert report.gathered_bytes <= unfolded_bytes
