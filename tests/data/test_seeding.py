import pytest

from strucspars.data.image_set import Stream, generator_for, mixed_seed


def test_different_numbers_give_different_seeds() -> None:
    # Pairs that a plain SeedSequence would confuse: zeros at the end, numbers of more than one word.
    keys = [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (2**32,), (2**32, 0), (1, 1), (2**32 + 1,), (1, 0, 0)]
    seeds = {mixed_seed(stream, *key) for stream in Stream for key in keys}
    assert len(seeds) == len(Stream) * len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert mixed_seed(Stream.ORDER, 0, 0) == 5133296750708835428
    assert mixed_seed(Stream.CROPS, 3, 1) == 3580621859665778540
    assert mixed_seed(Stream.SAMPLE, 7, 3, 1000) == 3674054434052005429


def test_a_generator_is_that_of_its_seed() -> None:
    assert generator_for(Stream.CROPS, 5).initial_seed() == mixed_seed(Stream.CROPS, 5)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_numbers_that_would_wrap_around_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match=str(value)):
        mixed_seed(Stream.ORDER, value)
