"""The command that times networks."""

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import strucspars as ss
from strucspars.bench.networks import PAPER_GROUPS
from strucspars.bench.results import report_from_json
from strucspars.bench.suite import Subject
from strucspars.convert.comparison import Comparison
from strucspars.models.catalogue import build_model

SMALL = "tiny_networks:small"
RECORDED = Path(__file__).parents[2] / "results/cifar10/cifar10-resnet20-40"
QUICK = ("--runtimes", "pytorch", "--seconds", "0.1")
OWN = (SMALL, "--classes", "3", "--image-shape", "3x16x16", *QUICK)


def test_a_network_by_name_is_timed_dense_and_compressed(call: Any) -> None:
    said = call("bench", *OWN, "--rates", "0.3,0.6")
    assert said.status == 0
    assert "tiny_networks:small, 16 x 16, batch 1, 1 thread" in said.out
    assert [line.split()[1] for line in said.out.splitlines() if line.startswith("PyTorch ")] == ["dense", "30%", "60%"]


def test_the_report_goes_to_a_file_and_to_scripts(call: Any) -> None:
    said = call("bench", *OWN, "--batch", "1,2", "--out", "bench.json", "--json")
    assert said.status == 0
    report = report_from_json(Path("bench.json").read_text())
    assert report.document() == json.loads(said.out)
    assert {row.batch for row in report.rows} == {1, 2}
    assert report.command == (
        "strucspars bench tiny_networks:small --runtimes pytorch --batch 1,2 --seconds 0.1 --classes 3 "
        "--image-shape 3x16x16"
    )


def test_a_run_is_timed_against_its_dense_network(call: Any, finished: Path) -> None:
    said = call("bench", "runs/demo", "--model", SMALL, *QUICK, "--json")
    assert said.status == 0
    document = json.loads(said.out)
    assert [row["form"] for row in document["rows"]] == ["dense", "compressed", "bound"]
    dense, compressed, _ = (row["size"] for row in document["rows"])
    assert compressed["params"] < dense["params"]
    assert document["rows"][0]["network"] == "demo"
    assert document["command"].startswith("strucspars bench runs/demo --runtimes")


@pytest.fixture
def asked(call: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Subject, str]]:
    """The subject and the command that a call of bench asks for; nothing is measured."""
    found: list[tuple[Subject, str]] = []

    def bench(subject: Subject, *, command: str, **options: object) -> None:
        found.append((subject, command))
        raise ValueError("enough")

    def called(*arguments: str) -> tuple[Subject, str]:
        said = call("bench", *arguments)
        assert said.err == "error: enough\n"
        return found.pop()

    monkeypatch.setattr("strucspars.bench.suite.bench", bench)
    return called


@pytest.mark.parametrize("absolute", [True, False])
def test_where_a_path_from_outside_lies_is_not_told(asked: Any, tmp_path: Path, absolute: bool) -> None:
    shutil.copytree(RECORDED, tmp_path / "someone" / "demo")
    place = tmp_path if absolute else Path("..") / tmp_path.name
    assert asked(str(place / "someone" / "demo"))[1] == "strucspars bench demo"


MAPS = """
import torch
from torch import nn


def maps(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, num_classes, 1))


class Several(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.maps = maps(num_classes)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.maps(images)
        return scores, scores.mean((2, 3))
"""


@pytest.fixture
def one_shot(call: Any, networks: Path) -> Callable[[str], int]:
    """Compresses a network of the module above into a folder; gives its dense parameters."""
    (networks / "own_maps.py").write_text(MAPS)

    def compressed(name: str) -> int:
        model = build_model(f"own_maps:{name}", num_classes=5)
        torch.save(model.state_dict(), "trained.pt")
        shape = ("--classes", "5", "--image-shape", "3x16x16")
        arguments = ("--model", f"own_maps:{name}", "--target", "0.3", *shape, "--run", "one-shot")
        assert call("compress", "trained.pt", *arguments).status == 0
        return sum(parameter.numel() for parameter in model.parameters())

    return compressed


def test_a_network_of_maps_is_timed_against_its_own_dense_one(call: Any, one_shot: Callable[[str], int]) -> None:
    params = one_shot("maps")
    said = call("bench", "one-shot", "--model", "own_maps:maps", *QUICK, "--json")
    assert (said.status, said.err) == (0, "")
    assert json.loads(said.out)["rows"][0]["size"]["params"] == params


def test_a_network_of_several_outputs_is_refused_in_words(call: Any, one_shot: Callable[[str], int]) -> None:
    one_shot("Several")
    said = call("bench", "one-shot", "--model", "own_maps:Several", *QUICK)
    assert said.status == 2
    assert "the network gives a tuple for random images; runtimes are compared by one tensor" in said.err


def test_a_dense_run_is_timed_once_and_said_to_have_nothing_beside_it(call: Any, tiny: tuple[str, ...]) -> None:
    assert call("run", "demo-dense", *tiny, "--quiet").status == 0
    said = call("bench", "runs/demo-dense", "--model", SMALL, *QUICK)
    assert said.status == 0
    assert [line.split()[1] for line in said.out.splitlines() if line.startswith("PyTorch ")] == ["dense"]
    assert "there is nothing to compare" in " ".join(said.out.split())


def test_dense_weights_of_a_file_are_timed_alone_or_with_orders_learned_from_them(call: Any, networks: Path) -> None:
    torch.save(build_model(SMALL, num_classes=3).state_dict(), "trained.pt")
    command = ("bench", "trained.pt", "--model", SMALL, *OWN[1:], "--json")
    alone, compressed = (json.loads(call(*command, *options).out)["rows"] for options in ((), ("--orders", "shared")))
    assert [row["form"] for row in alone] == ["dense"]
    assert [(row["form"], row["orders"]) for row in compressed] == [
        ("dense", None),
        ("compressed", "shared"),
        ("bound", None),
    ]
    assert {row["network"] for row in compressed} == {"trained.pt"}


def test_a_report_that_is_there_is_replaced_only_by_force(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("bench.json").write_text("precious")
    Path("link.json").symlink_to("bench.json")
    with monkeypatch.context() as patched:
        patched.setattr("strucspars.bench.suite.bench", _never)
        for name in ("bench.json", "link.json"):
            said = call("bench", *OWN, "--out", name)
            assert said.status == 2
            assert f"{name} exists already; replace it with --force" in said.err
    assert Path("bench.json").read_text() == "precious"
    assert call("bench", *OWN, "--out", "link.json", "--force").status == 0
    assert Path("link.json").is_symlink()
    assert report_from_json(Path("bench.json").read_text()).rows


def _never(*arguments: object, **options: object) -> None:
    raise AssertionError("measured before it was known whether the report can be written")


def test_code_that_a_folder_names_is_run_only_if_the_user_names_it(call: Any, finished: Path) -> None:
    said = call("bench", "runs/demo", *QUICK)
    assert said.status == 2
    assert f"--model {SMALL}" in said.err


def test_wrong_outputs_are_shown_and_are_no_success(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Comparison(relative_error=0.5, tolerance=1e-4, complaint="the output is off by 0.5")
    monkeypatch.setattr("strucspars.bench.suite.compare_outputs", lambda outputs, expected: wrong)
    said = call("bench", *OWN)
    assert said.status == 1
    assert "[1] not timed: the output is off by 0.5" in said.out
    assert "3 of 3 programs were not timed" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runtimes", "onnx"), "did you mean 'onnxruntime'?"),
        (
            ("--rates", "0.5,much"),
            "--rates must be fractions between 0 and 1, separated by commas; got '0.5,much'",
        ),
        (("--rates", "0"), "--rates must be fractions between 0 and 1"),
        (("--rates", "1.5"), "between 0 and 1, separated by commas; got '1.5'"),
        (("--batch", "0"), "--batch must be whole numbers from 1 on, separated by commas; got '0'"),
        (
            ("--threads", "1,0"),
            "from 1 on, or all, separated by commas; got '1,0'",
        ),
        (("--threads", "some"), "--threads must be whole numbers from 1 on, or all"),
        (("--seconds", "-1"), "seconds must be a positive number"),
        (("resnet-50",), "did you mean 'resnet50'?"),
        (("empty",), "not a run folder"),
        (("--out", "nowhere/bench.json"), "the folder nowhere does not exist"),
        (("--out", "empty"), "empty is a folder; name a file with --out"),
    ],
)
def test_wrong_use_is_an_error_before_anything_is_built(call: Any, arguments: tuple[str, ...], message: str) -> None:
    Path("empty").mkdir()
    said = call("bench", *arguments)
    assert said.status == 2
    assert message in said.err
    assert said.out == ""


def test_by_default_the_papers_resnet50_is_timed_for_one_image_on_one_thread(asked: Any) -> None:
    subject, _ = asked()
    assert (subject.network, subject.image_shape) == ("resnet50", (3, 224, 224))
    assert subject.runtimes == ("onnxruntime", "pytorch", "openvino")
    assert (subject.batches, subject.threads) == ((1,), (1,))


def test_all_threads_on_one_core_are_one(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    subject, _ = asked("--threads", "1,all")
    assert subject.threads == (1,)


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_on_a_terminal_the_progress_is_shown_unless_quiet(
    call: Any, monkeypatch: pytest.MonkeyPatch, quiet: tuple[str, ...]
) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, force_interactive=True, width=120)
    monkeypatch.setattr("strucspars.cli.console.Console", lambda **options: terminal)
    assert call("bench", *OWN, *quiet).status == 0
    assert (screen.getvalue() == "") == bool(quiet)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What networks are asked for; none is built."""
    asked: list[tuple[Any, ...]] = []

    def random_networks(name: str, rates: tuple[float, ...], **options: Any) -> list[Any]:
        asked.append((name, rates, options))
        return []

    monkeypatch.setattr("strucspars.bench.networks.random_networks", random_networks)
    return asked


def test_a_network_is_built_as_it_is_asked_for(asked: Any, built: list[tuple[Any, ...]]) -> None:
    options = ("--min-channels-per-group", "8", "--classes", "7", "--image-shape", "3x64x32", "--orders", "free,shared")
    subject, _ = asked("--rates", "0.3,0.6", *options)
    subject.build()
    expected = {
        "image_shape": (3, 64, 32),
        "num_classes": 7,
        "min_channels_per_group": 8,
        "orders": ("free", "shared"),
    }
    assert built == [("resnet50", (0.3, 0.6), expected)]


@pytest.mark.parametrize(
    ("network", "rates", "classes", "side"),
    [("resnet50", tuple(PAPER_GROUPS["resnet50"]), 1000, 224), ("cifar-resnet20", (0.5,), 10, 32)],
)
def test_a_network_has_the_rates_and_images_that_it_is_made_for(
    network: str, rates: tuple[float, ...], classes: int, side: int, asked: Any, built: list[tuple[Any, ...]]
) -> None:
    subject, _ = asked(network)
    subject.build()
    ((_, asked_rates, options),) = built
    assert asked_rates == rates
    assert (options["num_classes"], options["image_shape"]) == (classes, (3, side, side))


def test_a_network_has_the_wider_groups_that_were_asked_for(asked: Any) -> None:
    assert asked("--widen-groups-below", "4")[0].widen_groups_below == 4


ALL_OPTIONS = (
    *("resnet50", "--rates", "0.3", "--runtimes", "pytorch", "--batch", "2", "--threads", "1,all"),
    *("--min-channels-per-group", "8", "--widen-groups-below", "4", "--seconds", "0.5"),
    *("--classes", "7", "--image-shape", "3x64x32"),
)


def test_the_report_names_the_command_with_every_option(asked: Any) -> None:
    assert asked(*ALL_OPTIONS, "--out", "bench.json", "--json", "--quiet")[1].split() == [
        *("strucspars", "bench"),
        *ALL_OPTIONS,
    ]


def test_a_network_with_weights_is_not_timed_with_options_that_would_be_ignored(call: Any) -> None:
    said = call("bench", str(RECORDED), "--rates", "0.5", "--min-channels-per-group", "2")
    complaint = f"--rates and --min-channels-per-group: the network in {RECORDED} has its own; leave them out"
    assert (said.status, said.err) == (2, f"error: {complaint}\n")
    said = call("bench", str(RECORDED), "--classes", "7")
    assert (said.status, said.err) == (2, f"error: --classes: the run in {RECORDED} has its own; leave it out\n")


def test_a_checkpoint_is_timed_against_its_dense_network(call: Any, networks: Path) -> None:
    model = build_model(SMALL, num_classes=7)
    ss.save(ss.convert_(model, ss.one_shot_plan(model, target=0.3)), "small.safetensors")
    said = call("bench", "small.safetensors", "--model", SMALL, "--image-shape", "3x16x16", *QUICK, "--json")
    assert said.status == 0
    rows = json.loads(said.out)["rows"]
    assert [(row["network"], row["form"]) for row in rows[:2]] == [
        ("small.safetensors", "dense"),
        ("small.safetensors", "compressed"),
    ]


def test_all_threads_are_as_many_as_there_are_cores(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    subject, _ = asked("--threads", "2,all")
    assert subject.threads == (2, 4)
