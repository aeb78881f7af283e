"""Reports of one-shot compression, which has no training to tell of."""

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from strucspars.cli.main import main
from strucspars.export.storage import load
from strucspars.io.arrays import load_arrays
from strucspars.models.catalogue import build_model
from strucspars.nn.groupable import select_layers
from strucspars.nn.importance import importance_matrix
from strucspars.report.contents import headlines, run_contents
from strucspars.report.page import RunLink, run_page, runs_table
from strucspars.report.reading import read_run
from strucspars.train.run_folder import ONE_SHOT_STATE

NETWORK = "cifar-resnet8"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint `weights.pt`, its one-shot run `run`, and the compressed `a.safetensors`."""
    place = tmp_path_factory.mktemp("one-shot")
    torch.manual_seed(0)
    torch.save(build_model(NETWORK, num_classes=10).state_dict(), place / "weights.pt")
    assert compress(place, "--run", str(place / "run"), "--out", str(place / "a.safetensors")) == 0
    return place


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
    assert run.plan is not None
    params = [sum(parameter.numel() for parameter in network.parameters()) for network in (dense, small)]
    assert run.plan.removed_param_fraction == pytest.approx(1 - params[1] / params[0])


def test_its_state_says_what_it_is(made: Path) -> None:
    run = read_run(made / "run")
    assert (run.state, run.is_finished, run.summary) == (ONE_SHOT_STATE, True, None)


def test_the_headlines_have_sizes_and_the_lost_norm_and_no_accuracy(made: Path) -> None:
    run = read_run(made / "run")
    assert run.one_shot is not None
    shown = {headline.label: headline for headline in headlines(run)}
    assert run.plan is not None
    assert shown["parameters"].value == f"{run.plan.removed_param_fraction:.2%} removed"
    assert shown["accuracy"].value == "not measured"
    assert shown["lost norm"].value == f"{run.one_shot['lost_norm']:.2%}"
    assert shown["target"].value == "50.00%"
    assert not any("top-1" in label for label in shown)


def test_a_target_of_macs_is_compared_with_the_macs(made: Path) -> None:
    run = read_run(made / "run")
    assert run.plan is not None
    notes = []
    for budget in ("params", "macs"):
        plan = replace(run.plan, budget=budget, target=0.3, removed_param_fraction=0.3, removed_mac_fraction=0.4)
        recipe = replace(run.recipe, sparsify=replace(run.recipe.sparsify, budget=budget))
        told = replace(run, plan=plan, recipe=recipe)
        notes += [headline.note for headline in headlines(told) if headline.label == "target"]
    assert notes == ["30.00% of the parameters reached", "40.00% of the MACs reached"]


def test_its_table_has_layers_without_churn(made: Path) -> None:
    run = read_run(made / "run")
    (table,) = run_contents(run).tables
    assert not any("churn" in title for title in table.columns)
    assert len(table.rows) == len(run.weight_shapes)


def test_the_page_says_so_and_shows_no_stages_that_never_ran(made: Path) -> None:
    run = read_run(made / "run")
    contents = run_contents(run)
    assert {figure.name.partition("-")[0] for figure in contents.figures} == {"cardinality", "confusion", "importance"}
    page = run_page(contents)
    assert ONE_SHOT_STATE in page
    assert "stage1" not in page
    assert "S before training" not in page


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
