"""What a user reads after a slip: the value, what is wrong with it and what to do, in one line. Nothing is left."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

NETWORKS = """
from torch import nn

value = 3


def broken(num_classes: int) -> nn.Module:
    raise KeyError("layers")
"""


SMALL = "tiny_networks:small"


COMPRESS = ("--model", SMALL, "--target", "0.3", "--classes", "7", "--image-shape", "3x16x16")


A_FILE = "give a .safetensors, .pt, .pth file of a state dict"


AS_KEYS = "options of a recipe are given as key=value, such as engine.device=cpu; see --help"


MENDED = "fix it, or name another (on the command line, --debug shows where it fails)"


A_RUN = "give one that strucspars run or compress --run has made"


SLIPS = {
    # Values that are read off the command line.
    ("run", "demo", "--jobs", "-2"): "greater than or equal to 1, got '-2'; see --help",
    ("run", "demo", "--jobs", "two"): "got 'two'; see --help",
    ("summary", "resnet18", "--classes", "0"): "got '0'; see --help",
    ("compress", "a.pt", "--model", SMALL, "--target", "half"): "got 'half'; see --help",
    ("run", "demo", "--export", "tflite"): "format must be one of onnx, openvino, torch",
    ("reproduce",): "Choose from: table1, table2, table3, table5; see --help",
    ("reproduce", "table1", "--rows", ""): "--rows: table1 has no row ''; --list shows all",
    # Options of other commands.
    ("run", "demo", "--target", "0.5"): f"No such option: --target; {AS_KEYS}",
    ("eval", "runs/demo", "--target", "0.5"): f"No such option: --target; {AS_KEYS}",
    ("eval", "runs/demo", "--classes", "3"): "--classes: the run in runs/demo has its own; leave it out",
    ("summary", "resnet18", "--target", "0.5"): "No such option: --target; see --help",
    # Recipes.
    ("run", "nowhere.yaml"): "give the path of a YAML file, or the name of a recipe of the package, such as demo",
    ("run", "folder"): "folder: this is a folder, not a recipe; give a YAML file",
    ("run", "run"): "to continue the run there, give run/recipe.yaml, and --out run",
    ("run", "binary.yaml"): "binary.yaml is not UTF-8 text",
    ("run", "demo", "data.name=folder"): "needs a root: the folder with train/ and val/; give data.root=FOLDER",
    ("run", "demo", "sparsify.from_run=nowhere"): "nowhere is not a run that has finished its first stage; finish it",
    ("run", "demo", "sparsify.include=['x*']"): "'x*' matches no layer of the model; a summary of it lists them",
    # Networks that are somebody else's code.
    ("summary", "slips:broken"): f"network 'slips:broken': building it fails: KeyError: 'layers'; {MENDED}",
    ("bench", "slips:value"): f"building it fails: TypeError: 'int' object is not callable; {MENDED}",
    ("summary", "syntax:f"): f"'syntax' cannot be imported: SyntaxError: invalid syntax (syntax.py, line 1); {MENDED}",
    ("run", "demo", "model.name=raising:f"): f"'raising' cannot be imported: RuntimeError: boom; {MENDED}",
    ("summary", "resnet18", "--image-shape", "1x32x32"): "error: network 'resnet18' cannot take images of shape",
    # Weights.
    ("compress", "nowhere.pt", *COMPRESS): f"weights 'nowhere.pt': there is no such file; {A_FILE}",
    ("compress", "folder.pt", *COMPRESS): f"weights 'folder.pt': this is a folder; {A_FILE}",
    ("compress", "folder", *COMPRESS): "weights 'folder': this is a folder, and only networks of torchvision",
    ("compress", "text.pt", *COMPRESS): f"of another kind than its name says (KeyError: 101); {A_FILE}",
    ("compress", "other.pt", *COMPRESS): "belong to another network: the weights lack: 0.weight",
    ("compress", "other.pt", *COMPRESS, "--out", "a.onnx"): "written as a .safetensors file; call it a.safetensors",
    # Folders of runs.
    ("eval", "nowhere"): f"nowhere is not a run folder: there is no such folder; {A_RUN}",
    ("summary", "folder"): f"folder is not a run folder: it has no recipe.yaml; {A_RUN}",
    ("bench", "text.pt"): "holds weights but no network; name the network with --model, such as --model resnet50",
    ("bench", "no/where"): "there is no file or folder no/where; give the folder of a run, a checkpoint with --model",
    ("bench", SMALL, "--model", "resnet18"): f"weights '{SMALL}': there is no such file, and torchvision's weights of",
}


@pytest.fixture
def slips(networks: Path) -> None:
    """Files and folders to take for something else."""
    for folder in ("folder", "folder.pt", "run"):
        Path(folder).mkdir()
    Path("run/recipe.yaml").write_text("base: demo\n")
    Path("slips.py").write_text(NETWORKS)
    Path("syntax.py").write_text("def f(:\n")
    Path("raising.py").write_text("raise RuntimeError('boom')\n")
    Path("binary.yaml").write_bytes(b"\xff\xfe")
    Path("text.pt").write_text("hello")
    torch.save({"weight": torch.zeros(2)}, "other.pt")


@pytest.mark.usefixtures("slips")
@pytest.mark.parametrize("arguments", SLIPS, ids=" ".join)
def test_a_slip_is_told_with_its_value_its_reason_and_a_remedy(arguments: tuple[str, ...], call: Any) -> None:
    said = call(*arguments)
    assert said.status == 2
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert SLIPS[arguments] in said.err


def test_code_that_fails_is_shown_where_it_does_for_the_asking(slips: None, call: Any) -> None:
    said = call("summary", "slips:broken", "--debug")
    assert said.status == 2
    assert 'raise KeyError("layers")' in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "secret.yaml"),
        ("compress", "secret.pt", *COMPRESS),
        ("compress", "secret.safetensors", *COMPRESS),
        ("summary", "secret.safetensors", "--model", SMALL),
        ("export", "secret.safetensors", "--model", SMALL, "--format", "onnx"),
    ],
    ids=" ".join,
)
def test_an_unreadable_file_is_not_called_damaged(
    arguments: tuple[str, ...], call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by taking the right away: the administrator may read anything.
    def refusing(opened: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Path, *options: Any, **more: Any) -> Any:
            if Path(path).name.startswith("secret"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return opened(path, *options, **more)

        return refuse

    Path(arguments[1]).touch()
    monkeypatch.setattr(Path, "open", refusing(Path.open))
    monkeypatch.setattr(os, "open", refusing(os.open))
    said = call(*arguments)
    assert said.status == 2
    assert said.err.startswith("error: ")
    assert arguments[1] in said.err
    assert "Permission denied; " in said.err
    assert "Errno" not in said.err
    assert "damaged" not in said.err


def test_what_the_system_refuses_comes_with_a_remedy(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    said = call("summary", "sealed/run")
    assert said.status == 2
    remedy = "change its permissions or those of its folder, or choose another path"
    assert said.err == f"error: sealed/run: Permission denied; {remedy}\n"


REFUSED = {
    "run, recipe": ("run", "no-such-recipe"),
    "run, data": ("run", "cifar10-resnet20-dense"),
    "run, teacher": ("run", "demo", "finetune.teacher=nowhere"),
    "run, network": ("run", "demo", "model.name=no-such-network"),
    "run, weights": ("run", "demo", "model.weights=nowhere.pt", "--out", "deep/run"),
    "run, seeds": ("run", "demo", "finetune.teacher=nowhere", "--seeds", "0,1", "--jobs", "2"),
    "demo": ("demo", "model.name=no-such-network"),
    "reproduce": ("reproduce", "table1", "--rows", "cifar10-resnet20-40"),
    "reproduce, ablation": ("reproduce", "table3", "--rows", "cifar10-resnet56-60-random"),
    "compress, checkpoint": ("compress", "nowhere.pt", "--target", "0.3", "--run", "deep/run", "--model", "resnet18"),
    "compress, network": ("compress", "DEFAULT", "--target", "0.3", "--run", "deep/run", "--model", "nothing"),
    "report": ("report", "nowhere", "--out", "deep/report"),
    "bench": ("bench", "no-such-network", "--out", "bench.json", "--seconds", "1"),
    "export": ("export", "nowhere.pt", "--model", "resnet18", "--format", "onnx"),
}


@pytest.mark.parametrize("cause", REFUSED)
def test_a_refused_command_leaves_nothing(call: Any, cause: str) -> None:
    before = [path for path in Path().rglob("*") if "__pycache__" not in path.parts]
    said = call(*REFUSED[cause])
    assert said.status in (1, 2)
    assert said.err.splitlines()[-1].startswith("error: ")
    assert [path for path in Path().rglob("*") if "__pycache__" not in path.parts] == before
