"""The program as a whole: help, errors, exit statuses, completion."""

import logging
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import timm
import torch
from typer.models import OptionInfo
from typer.testing import CliRunner

from strucspars._version import __version__
from strucspars.cli.console import complete_model, from_home
from strucspars.cli.errors import (
    BY_SIGNAL,
    FAILED,
    WRONG_USE,
    Interrupted,
    explained,
    reported,
)
from strucspars.cli.main import app, main
from strucspars.models.catalogue import torchvision_names
from strucspars.train.observer import RunFailed
from strucspars.train.recipe_reading import option_groups
from strucspars.train.run_folder import RunFolderBusy

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "command-line.md"
COMMANDS = ("demo", "run", "compress", "eval", "summary", "export", "bench", "sweep", "report", "reproduce")


def test_help_names_every_command() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    outcome = CliRunner().invoke(app, [command, "--help"])
    assert outcome.exit_code == 0
    assert "Examples:" in outcome.stdout
    assert f"strucspars {command} " in outcome.stdout
    assert "--debug" in outcome.stdout
    assert "\x1b" not in outcome.stdout


def test_every_option_that_is_a_path_may_begin_at_home() -> None:
    functions = {command.name: command.callback for command in app.registered_commands if command.callback}
    callbacks = [
        (name, part.callback)
        for name, function in functions.items()
        for hint in get_type_hints(function, include_extras=True).values()
        for part in get_args(hint)
        if isinstance(part, OptionInfo) and Path in (get_args(hint)[0], *get_args(get_args(hint)[0]))
    ]
    assert {name for name, _ in callbacks} == set(COMMANDS) - {"eval", "summary"}
    assert [name for name, callback in callbacks if callback is not from_home] == []
    assert from_home(Path("~/there")) == Path.home() / "there"


def test_the_help_of_eval_names_only_what_eval_can_change() -> None:
    assert "stage1" not in CliRunner().invoke(app, ["eval", "--help"]).stdout


def test_without_a_command_the_help_is_shown(call: Any) -> None:
    said = call()
    assert said.status == 0
    assert "Examples:" in said.out


def test_the_version_is_the_packages(call: Any) -> None:
    said = call("--version")
    assert (said.status, said.out) == (0, f"strucspars {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("frobnicate",), "frobnicate"),
        (("run",), "Missing argument"),
        (("run", "demo", "--jobs", "0"), "--jobs"),
        (("run", "demo", "--seeds", "0;1"), "--seeds must be whole numbers"),
        (("run", "dmo"), "did you mean 'demo'"),
        (("run", "demo", "stage1.epoch=3"), "did you mean 'stage1.epochs'"),
        (("run", "demo", "stage1.epochs"), "key=value"),
        (("run", "demo", "sparsify.target=two"), "sparsify.target"),
        (("run", "cifar10-resnet20-40"), "needs a root"),
        (("run", "cifar10-resnet20-40", "data.root=nowhere"), "nowhere"),
        (("run", "demo", "model.name=resnet5"), "resnet5"),
        (("summary", "nowhere"), "nowhere"),
        (("summary", "weights.safetensors"), "--model"),
        (("summary", "resnet18", "--image-shape", "32"), "--image-shape"),
        (("eval", "nowhere"), "not a run folder"),
        (("compress", "nowhere.pt", "--model", "resnet18", "--target", "0.5"), "nowhere.pt"),
        (("compress", "x.pt", "--model", "resnet18", "--target", "1.5"), "target"),
        (("reproduce", "table4"), "table4"),
        (("reproduce", "table1", "--rows", "cifar10-resnet56"), "did you mean"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(arguments: tuple[str, ...], part: str, call: Any) -> None:
    said = call(*arguments)
    assert said.status == 2
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert part in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "sparsify.target=two"),
        ("run", "dmo"),
        ("compress", "nowhere.pt", "--model", "resnet18", "--target", "0.5"),
        ("eval", "nowhere"),
        ("summary", "nowhere"),
        ("export", "nowhere", "--format", "onnx"),
        ("bench", "nowhere"),
        ("report", "nowhere"),
        ("reproduce", "table1", "--rows", "nowhere"),
        ("reproduce", "table1", "--collect"),
    ],
    ids=" ".join,
)
def test_wrong_use_leaves_the_standard_output_empty_with_json_too(arguments: tuple[str, ...], call: Any) -> None:
    said = call(*arguments, "--json")
    assert (said.status, said.out) == (WRONG_USE, "")
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1


def test_the_page_about_the_command_line_has_every_exit_status() -> None:
    statuses = re.findall(r"^\| (\d[\d n+]*) \|", PAGE.read_text(), re.MULTILINE)
    assert statuses == ["0", str(FAILED), str(WRONG_USE), f"{BY_SIGNAL} + n"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunFolderBusy("busy"), 1),
        (RunFailed("failed"), 1),
        (OSError(28, "No space left on device"), 1),
        (torch.OutOfMemoryError("CUDA out of memory"), 1),
        (ImportError("No module named 'timm'"), 2),
        (PermissionError(13, "Permission denied", "there"), 2),
        (ValueError("wrong"), 2),
    ],
)
def test_expected_errors_have_a_status_each(error: Exception, status: int) -> None:
    explanation = explained(error)
    assert explanation is not None
    assert explanation[1] == status
    assert "\n" not in explanation[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sklearn.datasets", "sklearn is missing: pip install 'strucspars[cli]'"),
        ("my_package", "No module named 'my_package'"),
    ],
)
def test_only_packages_of_the_extra_are_blamed_on_it(name: str, words: str) -> None:
    assert explained(ModuleNotFoundError(f"No module named {name!r}", name=name)) == (words, WRONG_USE)


def test_a_missing_module_of_our_own_keeps_its_trace() -> None:
    assert explained(ModuleNotFoundError("No module named 'strucspars.lost'", name="strucspars.lost")) is None


def test_an_unexpected_error_keeps_its_trace() -> None:
    assert explained(RuntimeError("odd")) is None
    with pytest.raises(RuntimeError, match="odd"):
        reported(RuntimeError("odd"), [])


def test_debug_shows_where_an_error_comes_from(call: Any) -> None:
    said = call("run", "dmo", "--debug")
    assert said.status == 2
    assert "Traceback" in said.err
    assert "recipe_reading.py" in said.err


@pytest.mark.parametrize(("signal_number", "status"), [(2, 130), (15, 143)])
def test_a_signal_gives_its_status_and_the_command_to_resume(
    signal_number: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error = Interrupted("stopped; saved", signal_number)
    assert reported(error, ["run", "demo", "model.name=a b"]) == status
    assert "run demo 'model.name=a b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("world", "local", "command"),
    [
        ("2", "2", "to resume: torchrun --nproc-per-node 2 -m strucspars run demo\n"),
        ("2", None, "to resume: torchrun --nproc-per-node 2 -m strucspars run demo\n"),
        ("8", "4", "as before: torchrun --nnodes 2 --nproc-per-node 4 -m strucspars run demo\n"),
        ("1", "1", "to resume: python -m strucspars run demo\n"),
    ],
)
def test_under_torchrun_the_command_to_resume_is_torchruns(
    world: str, local: str | None, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/there/strucspars/__main__.py"])
    monkeypatch.setenv("WORLD_SIZE", world)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert reported(Interrupted("stopped; saved", 2), ["run", "demo"]) == 130
    assert capsys.readouterr().err.endswith(command)


def test_ctrl_c_outside_of_a_run_is_status_130(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("strucspars.cli.summary.describe", interrupted)
    assert call("summary", "resnet18").status == 130


def test_the_librarys_warnings_are_lines_of_the_first_process(
    call: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warning(*arguments: object, **options: object) -> None:
        logging.getLogger("strucspars.somewhere").warning("beware of %s", "dogs")
        raise ValueError("enough")

    monkeypatch.setattr("strucspars.cli.summary.describe", warning)
    assert call("summary", "resnet18").err == "warning: beware of dogs\nerror: enough\n"
    monkeypatch.setenv("RANK", "1")
    assert call("summary", "resnet18").err == "error: enough\n"
    assert logging.getLogger("strucspars").propagate


def test_only_the_first_of_several_processes_prints(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    said = call("summary", "tiny_networks:small", "--image-shape", "3x16x16")
    assert (said.status, said.out) == (0, "")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("run cifar10-resnet20-sl", ["cifar10-resnet20-slimming40", "cifar10-resnet20-slimming60"]),
        ("run demo stage1.lr", ["stage1.lr=", "stage1.lr_warmup="]),
        ("eval runs/demo engine.de", ["engine.device="]),
        ("summary resnet1", ["resnet101", "resnet152", "resnet18"]),
        ("bench wide", ["wide_resnet101_2", "wide_resnet50_2"]),
        ("compress x.pt --model preact-resnet2", ["preact-resnet20"]),
    ],
)
def test_the_shell_completes(monkeypatch: pytest.MonkeyPatch, words: str, completed: list[str]) -> None:
    monkeypatch.setenv("COMP_WORDS", f"strucspars {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    outcome = CliRunner(env={"_STRUCSPARS_COMPLETE": "complete_bash"}).invoke(app, prog_name="strucspars")
    assert outcome.stdout.split() == completed


def test_completion_knows_the_networks_and_the_keys_of_recipes() -> None:
    assert set(torchvision_names()) <= set(complete_model(""))
    assert complete_model("timm:mobilenetv3_small_") == sorted(
        f"timm:{name}" for name in timm.list_models("mobilenetv3_small_*")
    )
    keys = [key for section in option_groups() for option in section.options for key in option.keys]
    told = (files("strucspars") / "recipes" / "_keys.txt").read_text().split()
    assert told == keys, "write the keys of option_groups() to recipes/_keys.txt, one per line"


def test_help_and_completion_need_neither_torch_nor_the_training() -> None:
    program = (
        "import sys; from strucspars.cli.main import main\n"
        "for command in ((), *((name,) for name in sys.argv[1:])): main((*command, '--help'))\n"
        "from strucspars.cli.console import complete_key, complete_model, complete_recipe\n"
        "for complete in (complete_key, complete_model, complete_recipe): complete('')\n"
        "print({'numpy', 'scipy', 'torch', 'torchvision', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, *COMMANDS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_main_reads_the_arguments_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["strucspars", "frobnicate"])
    assert main() == 2


def test_the_command_to_resume_is_the_one_that_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/there/bin/strucspars"])
    assert reported(Interrupted("stopped; saved", 2), ["run", "demo"]) == 130
    assert capsys.readouterr().err == "stopped; saved\nto resume: strucspars run demo\n"


def test_of_several_processes_the_first_alone_tells_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert reported(Interrupted("stopped; saved", 15), ["run", "demo"]) == 143
    assert capsys.readouterr().err == ""


def test_an_error_of_several_lines_is_one_line_with_all_of_them() -> None:
    words = "two things: the first; the second"
    assert explained(ValueError("two things:\n  the first\n  the second")) == (words, WRONG_USE)
