"""Data of a function of the user's code."""

from pathlib import Path
from typing import Any

import pytest
import torch

from strucspars.data.catalogue import batches_of, load_data
from strucspars.data.folder import FolderData

CODE = """
import torch


class Noisy(torch.utils.data.Dataset):
    classes = ["cat", "dog"]

    def __init__(self, count, size=8):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == 7:
            raise OSError("cable pulled")
        return torch.rand(3, self.size, self.size) + index, index % 2


class Nameless(Noisy):
    classes = None


def pair(root):
    assert root == "somewhere"
    return Noisy(6), Noisy(3)


def digits(root):
    from strucspars.data.catalogue import digits
    return digits()


def single(root):
    return Noisy(6)


def nameless(root):
    return Nameless(6), Nameless(3)


def unequal(root):
    return Noisy(6), Noisy(3, size=9)


def empty(root):
    return Noisy(6), Noisy(0)


def failing(root):
    raise OSError("no disk")


def long(root):
    return Noisy(8), Noisy(3)


def bytes_(root):
    dataset = Noisy(6)
    dataset.__class__ = type("Bytes", (Noisy,), {"__getitem__": lambda self, index: (torch.zeros(3, 8, 8).byte(), 0)})
    return dataset, dataset
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data_of_a_test.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)


def made(function: str) -> Any:
    return load_data(f"own_data_of_a_test:{function}", Path("somewhere"), seed=3)


def test_a_pair_of_datasets_gives_batches_with_the_same_random_numbers_each_time() -> None:
    data = made("pair")
    assert isinstance(data, FolderData)
    assert (data.num_classes, data.classes, data.image_shape) == (2, ("cat", "dog"), (3, 8, 8))
    assert data.preprocessing is None
    before = torch.get_rng_state()
    batches = batches_of(data, training=True, batch_size=4, device=torch.device("cpu"), seed=3)
    first, other, again = ([batch.images.clone() for batch in batches.epoch(epoch)] for epoch in (1, 2, 1))
    assert torch.equal(torch.cat(first), torch.cat(again))
    assert not torch.equal(torch.cat(first).sort(0).values, torch.cat(other).sort(0).values)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_function_may_return_the_project_s_own_data() -> None:
    assert made("digits").name == "digits"


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("single", "a pair of datasets to learn from and to test on; returned a Noisy"),
        ("nameless", "must have `classes`"),
        ("unequal", r"learn from are \(3, 8, 8\), to test on \(3, 9, 9\)"),
        ("empty", "a dataset is empty"),
        ("failing", "making them fails: OSError: no disk"),
        ("bytes_", "must be a float32 tensor .* got torch.uint8"),
        ("nothing", "has no 'nothing'"),
    ],
)
def test_what_cannot_be_used_is_refused_in_clear_words(function: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        made(function)


def test_an_image_that_cannot_be_made_is_named() -> None:
    batches = batches_of(made("long"), training=True, batch_size=8, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="image 7 of the data: OSError: cable pulled"):
        list(batches.epoch(0))
