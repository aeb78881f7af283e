"""Reports of one-shot compression, which has no training to tell of."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strucspars.cli.main import main
from strucspars.cost.layers import BeforeAfter
from strucspars.export.storage import load
from strucspars.io.arrays import load_arrays
from strucspars.models.catalogue import build_model
from strucspars.nn.groupable import select_layers
from strucspars.nn.importance import importance_matrix
from strucspars.report.contents import headlines, run_contents
from strucspars.report.one_shot import ONE_SHOT_STATE, OneShotOutcome
from strucspars.report.page import RunLink, run_page, runs_table
from strucspars.report.reading import read_run
from strucspars.report.tables import layer_table, size_table

NETWORK = "cifar-resnet8"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint `weights.pt`, its one-shot run `run`, and the compressed `a.safetensors`."""
    place = tmp_path_factory.mktemp("one-shot")
    torch.manual_seed(0)
    torch.save(build_model(NETWORK, num_classes=10).state_dict(), place / "weights.pt")
    assert compress(place, "--run", str(place / "run"), "--out", str(place / "a.safetensors")) == 0
    return place


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the run, with other contents of some files; None for files that are missing."""

    def copy(contents: dict[str, str | None]) -> Path:
        run = tmp_path / "run"
        (run / "importance").mkdir(parents=True)
        for file in (made / "run").rglob("*.*"):
            (run / file.relative_to(made / "run")).write_bytes(file.read_bytes())
        for name, text in contents.items():
            (run / name).unlink()
            if text is not None:
                (run / name).write_text(text)
        return run

    return copy


def compress(place: Path, *options: str) -> int:
    return main(["compress", str(place / "weights.pt"), "--model", NETWORK, "--target", "0.5", "--json", *options])


def test_the_folder_holds_what_was_compressed(made: Path) -> None:
    run = read_run(made / "run")
    dense = build_model(NETWORK, num_classes=10)
    dense.load_state_dict(torch.load(made / "weights.pt"))
    layers = select_layers(dense).layers
    stored = load_arrays(made / "run" / "importance" / "end.npz")
    assert list(stored) == [layer.name for layer in layers] == list(run.weight_shapes)
    for layer in layers:
        assert stored[layer.name].dtype == np.float16
        np.testing.assert_allclose(stored[layer.name], importance_matrix(layer.weight), rtol=1e-3)
    small = load(made / "run" / "model.safetensors", build_model(NETWORK, num_classes=10))
    same = load(made / "a.safetensors", build_model(NETWORK, num_classes=10))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(small.eval()(images), same.eval()(images))
    assert run.one_shot is not None
    assert run.one_shot.params.after == sum(parameter.numel() for parameter in small.parameters())
    assert run.one_shot.params.before == sum(parameter.numel() for parameter in dense.parameters())


def test_nothing_is_called_missing_that_one_shot_cannot_have(made: Path) -> None:
    run = read_run(made / "run")
    assert (run.problems, run.state, run.is_finished) == ((), ONE_SHOT_STATE, True)


def test_the_headlines_have_sizes_and_the_lost_norm_and_no_accuracy(made: Path) -> None:
    run = read_run(made / "run")
    assert run.one_shot is not None
    shown = {headline.label: headline for headline in headlines(run)}
    assert shown["parameters"].value == f"{run.one_shot.params.after:,}"
    assert shown["accuracy"].value == "not measured"
    assert shown["lost norm"].value == f"{run.one_shot.lost_norm:.2%}"
    assert shown["target"].value == "50.00%"
    assert not any("top-1" in label for label in shown)


def test_a_target_of_macs_is_compared_with_the_macs(made: Path) -> None:
    run = read_run(made / "run")
    assert run.plan is not None
    assert run.one_shot is not None
    outcome = replace(run.one_shot, params=BeforeAfter(100, 70), macs=BeforeAfter(1000, 600))
    notes = []
    for budget in ("params", "macs"):
        told = replace(run, plan=replace(run.plan, budget=budget), one_shot=outcome)
        notes += [headline.note for headline in headlines(told) if headline.label == "target"]
    assert notes == ["30.00% of the parameters reached", "40.00% of the MACs reached"]


def test_the_tables_have_sizes_and_layers_without_churn(made: Path) -> None:
    run = read_run(made / "run")
    assert run.one_shot is not None
    assert [row[1:3] for row in size_table(run).rows] == [
        (run.one_shot.params.before, run.one_shot.params.after),
        (run.one_shot.macs.before, run.one_shot.macs.after),
    ]
    table = layer_table(run)
    assert not any("churn" in column.title for column in table.columns)
    assert len(table.rows) == len(run.weight_shapes)


def test_the_page_says_so_and_shows_no_stages_that_never_ran(made: Path) -> None:
    run = read_run(made / "run")
    contents = run_contents(run)
    assert {figure.name.partition("-")[0] for figure in contents.figures} == {"cardinality", "confusion", "importance"}
    page = run_page(contents)
    assert ONE_SHOT_STATE in page
    assert "stage1" not in page
    assert "S before training" not in page
    assert "Not everything could be shown" not in page


def test_among_other_runs_it_has_no_data_and_no_accuracy(made: Path) -> None:
    run = read_run(made / "run")
    (row,) = runs_table([RunLink(run=run, title="run", address="")]).rows
    assert row[:4] == ("run", NETWORK, None, None)
    assert row[4] == pytest.approx(0.5, abs=0.05)
    assert row[5:] == (None, ONE_SHOT_STATE)


def test_the_command_on_the_page_repeats_it(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = run_page(run_contents(read_run(made / "run")))
    command = page.partition('<pre class="command" tabindex="0">')[2].partition("</pre>")[0]
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(command)
    assert (program, main(arguments)) == ("strucspars", 0)
    assert (Path("runs/run-again/plan.json")).read_text() == (made / "run" / "plan.json").read_text()


@pytest.mark.parametrize("name", ["plan.json", "importance/end.npz", "environment.json", "recipe.yaml"])
def test_missing_parts_are_named(copied: Any, name: str) -> None:
    if name == "recipe.yaml":
        with pytest.raises(ValueError, match="not a run folder"):
            read_run(copied({name: None}))
        return
    run = read_run(copied({name: None}))
    assert any(problem.startswith(name) for problem in run.problems)
    assert "Not everything could be shown" in run_page(run_contents(run))


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 1}'])
def test_a_damaged_outcome_is_named_and_the_rest_is_shown(copied: Any, text: str) -> None:
    run = read_run(copied({"one_shot.json": text}))
    assert [problem.partition(" ")[0].rstrip(":,") for problem in run.problems] == ["one_shot.json"]
    page = run_page(run_contents(run))
    assert ONE_SHOT_STATE in page
    assert "there is no command that repeats this run" in page


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("params", {"before": 5}),
        ("macs", {"before": 5, "after": "few"}),
        ("classes", True),
        ("classes", 10**30),
        ("image_shape", [3, 32]),
        ("lost_norm", 1.5),
        ("seconds", float("nan")),
        ("seconds", -1.0),
        ("params", {"before": 2**63, "after": 5}),
    ],
)
def test_an_outcome_of_other_values_is_refused(made: Path, key: str, value: object) -> None:
    values = json.loads((made / "run" / "one_shot.json").read_text())
    assert OneShotOutcome.from_json(values).to_json() == values | {"image_shape": tuple(values["image_shape"])}
    with pytest.raises(ValueError, match=key):
        OneShotOutcome.from_json(values | {key: value})
