"""What the golden tests share: recorded outcomes, and a working folder whose runs are made when they are asked for.

The tests know the program by its command line and its public names only, and record what comes out of it. After a
change that is meant, `GOLDEN_WRITE=1 pytest tests/golden` writes `expected/` again; the difference then shows what the
change does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_networks import small
from golden_record import Record
from golden_subject import Said, document_of, said
from torch import nn

from strucspars.models.catalogue import build_model

HERE = Path(__file__).parent
NETWORK = "golden_networks:small"
RECIPE = f"""
name: golden
seed: 3
data: {{name: digits, batch_size: 128}}
model: {{name: "{NETWORK}"}}
sparsify: {{target: 0.4, controller: paper, lambda_step: 0.004, lambda_warmup: 0, min_kept_norm: 0.55}}
slimming: {{target: 0.3, strength: 0.01}}
stage1: {{epochs: 4, lr: 0.02}}
finetune: {{form: masked}}
stage2: {{epochs: 2, lr: 0.02, weight_decay: 0.0001, schedule: constant, lr_warmup: 0}}
engine: {{device: cpu}}
"""
RUNS = {
    "structured": ("finetune.form=grouped",),
    "masked": (),
    "dense": ("kind=dense",),
    "taught": ("finetune.teacher=runs/dense",),
    "slimming": (
        *("kind=slimming", "model.name=cifar-resnet8", "model.weights=uneven.pt"),
        *("stage1.epochs=1", "stage2.epochs=1"),
    ),
    "as-they-are": ("model.weights=trained.pt", "stage1.epochs=0"),
}
NEEDED = {"taught": "dense"}


class Workplace:
    """A folder with a recipe, checkpoints and the runs that have been asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.documents: dict[str, Any] = {}
        (folder / "golden.yaml").write_text(RECIPE)
        torch.manual_seed(0)
        torch.save(small(10).state_dict(), folder / "trained.pt")
        uneven = build_model("cifar-resnet8", num_classes=10)
        with torch.no_grad():
            for module in uneven.modules():
                if isinstance(module, nn.BatchNorm2d):
                    # Far from each other: which channels go must not depend on the rounding of a CPU.
                    module.weight.uniform_(0.2, 1.5)
        torch.save(uneven.state_dict(), folder / "uneven.pt")

    def said(self, *arguments: str) -> Said:
        """What a call comes to."""
        return said(arguments, self.folder)

    def document(self, *arguments: str) -> Any:
        """The JSON document of a call."""
        return document_of(arguments, self.folder)

    def run(self, name: str) -> Any:
        """The document of a run, which is made now if it is not there."""
        if name not in self.documents:
            if name in NEEDED:
                self.run(NEEDED[name])
            arguments = ("run", "golden.yaml", *RUNS[name], "--out", f"runs/{name}", "--quiet")
            self.documents[name] = self.document(*arguments)
        return self.documents[name]

    def run_folder(self, name: str) -> Path:
        """The folder of a run, which is made now if it is not there."""
        self.run(name)
        return self.folder / "runs" / name


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden() -> Record:
    return Record(HERE / "expected")


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    place = Workplace(tmp_path_factory.mktemp("golden"))
    torch.set_num_threads(threads)
    return place
