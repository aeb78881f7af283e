"""What `strucspars compress` works with: the network, its images, and how to finetune it."""

from pathlib import Path

import pytest
import torch
from table2_recipes import write_image_folder

from strucspars.core.plan import Preprocessing
from strucspars.models.catalogue import build_model
from strucspars.train import deploy
from strucspars.train.deploy import (
    TrainedNetwork,
    device_for,
    finetuning_recipe,
    images_to_calibrate,
    labelled_batches,
    num_outputs,
    trained_network,
)
from strucspars.train.recipe import Device, EngineRecipe, Recipe, SparsifyRecipe

SMALL = Preprocessing(size=16, resize=18)
CODE = """
import torch


class Noise(torch.utils.data.Dataset):
    classes = ["a", "b", "c"]

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.rand(3, 16, 16), index % 3


def images(root):
    return Noise(), Noise()
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_images_of_a_test.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deploy, "default_readers", lambda: 0)
    return tmp_path


def network(num_classes: int = 3) -> TrainedNetwork:
    return TrainedNetwork(
        name="cifar-resnet8",
        weights="weights.pt",
        num_classes=num_classes,
        preprocessing=SMALL,
        image_shape=(3, 16, 16),
    )


def recipe_on(device: Device) -> Recipe:
    write_image_folder(Path("images"), num_classes=3, train_images=2)
    return finetuning_recipe("mine", network(), "images", None, epochs=1, sparsify=SparsifyRecipe(), device=device)


def recipe(data: str, *, epochs: int = 1, classes: int = 3, val: str | None = None) -> Recipe:
    return finetuning_recipe("mine", network(classes), data, val, epochs=epochs, sparsify=SparsifyRecipe())


def test_any_folder_of_images_and_any_function_gives_images_to_compress_with() -> None:
    write_image_folder(Path("images"), num_classes=3, train_images=15)
    for place, count in (("images", 40), ("images/train", 40), ("images/train/class0001", 15)):
        batches = images_to_calibrate(place, network().preprocessing, count=40)
        assert sum(map(len, batches)) == count
        assert {batch.shape[1:] for batch in batches} == {(3, 16, 16)}
    assert sum(map(len, images_to_calibrate("own_images_of_a_test:images", network().preprocessing, count=33))) >= 33


def test_the_gpu_is_used_where_there_is_one_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [device_for(asked).type for asked in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [device_for(asked).type for asked in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match="--device cuda: PyTorch sees no GPU"):
        device_for("cuda")
    assert recipe_on("cpu").engine.device == "cpu"


def test_a_gpu_finetunes_in_bfloat16_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    write_image_folder(Path("images"), num_classes=3, train_images=2)
    assert recipe("images").engine == EngineRecipe()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert recipe("images").engine == EngineRecipe(precision="bf16", channels_last=True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert recipe("images").engine == EngineRecipe(channels_last=True)


def test_labelled_images_must_be_those_of_the_network() -> None:
    write_image_folder(Path("images"), num_classes=3, test_images=2)
    for place in ("images", "images/val", "own_images_of_a_test:images"):
        labels = torch.cat(
            [batch.labels[batch.valid] for batch in labelled_batches(place, SMALL, num_classes=3).epoch(0)]
        )
        assert set(labels.tolist()) == {0, 1, 2}
        with pytest.raises(ValueError, match="the network has 4 outputs"):
            labelled_batches(place, SMALL, num_classes=4)


def test_a_small_data_set_is_finetuned_slowly_in_small_batches() -> None:
    write_image_folder(Path("images"), num_classes=3, train_images=20)
    stages = {epochs: recipe("images", epochs=epochs) for epochs in (1, 10, 100)}
    assert {each.data.batch_size for each in stages.values()} == {3}
    rates = {epochs: each.stage2.lr for epochs, each in stages.items()}
    full = 0.005 * 3 / 32
    assert rates[100] == pytest.approx(full, rel=0.05)
    assert rates[10] == pytest.approx(full * (200 / 500) ** 0.5, rel=0.05)
    assert rates[1] == pytest.approx(full * (20 / 500) ** 0.5, rel=0.05)


def test_the_dense_network_teaches_its_own_classes_only() -> None:
    write_image_folder(Path("images"), num_classes=3, train_images=2)
    assert (recipe("images").finetune.teacher, recipe("images").data.num_classes) == ("weights", 3)
    assert (recipe("images", classes=7).finetune.teacher, recipe("images", classes=7).data.num_classes) == (None, None)
    for split in ("train", "val"):
        for number, name in enumerate(("5", "0", "3")):
            Path("images", split, f"class000{number}").rename(Path("images", split, name))
    some = recipe("images", classes=7)
    assert (some.finetune.teacher, some.data.num_classes) == ("weights", 7)
    assert recipe("own_images_of_a_test:images").finetune.teacher == "weights"


def test_images_of_another_size_scale_what_comes_before() -> None:
    torch.save(build_model("resnet18", num_classes=5).state_dict(), "weights.pt")
    found = trained_network("resnet18", "weights.pt", num_classes=5, image_shape=(3, 112, 112))
    assert found.preprocessing == Preprocessing(size=112, resize=128)
    assert trained_network("resnet18", "weights.pt", num_classes=5, image_shape=None).image_shape == (3, 224, 224)
    assert num_outputs(found.model(), found.image_shape) == 5
    assert num_outputs(found.model(9), found.image_shape) == 9
