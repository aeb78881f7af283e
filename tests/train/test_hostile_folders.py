"""Run folders from anywhere: nothing in them is executed, and what is wrong with them is said."""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strucspars.cli.export import export_network
from strucspars.cli.networks import find_target
from strucspars.report.reading import read_run
from strucspars.train.checkpoint import save_checkpoint, save_named
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run import RunInterrupted
from strucspars.train.run_folder import RunFolder
from strucspars.train.slimming import ChannelSelection

Recipes = Callable[..., Recipe]
EPOCHS = ("stage1.epochs=1", "stage2.epochs=2")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def stopped(small_recipe: Recipes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after the first of its two epochs of finetuning."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    questions = iter(range(100))
    with pytest.raises(RunInterrupted, match="after epoch 1 of finetune"):
        run_pipeline(small_recipe(*EPOCHS), path, should_stop=lambda: next(questions) >= 13)
    return path


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> RunFolder:
    """A copy of it to spoil."""
    return RunFolder(shutil.copytree(stopped, tmp_path / "run"))


def refusal(small_recipe: Recipes, run: RunFolder, *overrides: str) -> str:
    with pytest.raises(ValueError, match=re.escape(str(run.path))) as caught:
        run_pipeline(small_recipe(*EPOCHS, *overrides), run.path)
    return str(caught.value)


def contents(place: Path) -> dict[Path, bytes]:
    """All files; but for the lock, whose number of a process nobody minds."""
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != ".lock"}


def write_raw_checkpoint(path: Path, payload: bytes) -> None:
    """With a right mark and checksum, whatever the payload."""
    path.write_bytes(b"sspckpt1" + hashlib.sha256(payload).digest() + payload)


def test_the_stopped_run_goes_on_if_nothing_is_spoilt(small_recipe: Recipes, run: RunFolder) -> None:
    assert run_pipeline(small_recipe(*EPOCHS), run.path).finetuned.best_epoch in (1, 2)


@pytest.mark.parametrize("with_torch", [True, False])
def test_a_checkpoint_that_would_execute_something_is_refused(
    small_recipe: Recipes, run: RunFolder, tmp_path: Path, with_torch: bool
) -> None:
    proof = tmp_path / "executed"
    trap = {"version": 1, "model": Trap(proof)}
    buffer = io.BytesIO()
    torch.save(trap, buffer)
    for name in ("last.pt", "previous.pt"):
        write_raw_checkpoint(run.checkpoints / name, buffer.getvalue() if with_torch else pickle.dumps(trap))
    message = refusal(small_recipe, run)
    assert "no checkpoint can be used" in message
    assert "restore one from a copy, or delete them" in message
    assert not proof.exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 99}, "another version of strucspars (99, not 3)"),
        ({"metrics_rows": 50}, "but the checkpoint was made after 50"),
        ({"done_epochs": 40}, "does not belong to this run: it has 40 epochs and 0 steps of finetune"),
        ({"done_steps": 40}, "does not belong to this run: it has 1 epochs and 40 steps of finetune"),
        # Of six: an epoch that is over is told as such.
        ({"done_steps": 6}, "does not belong to this run: it has 1 epochs and 6 steps of finetune"),
        ({"model": {}}, "does not belong to this run: Error(s) in loading state_dict"),
        ({"model": None}, "does not belong to this run"),
        ({"momenta": [torch.zeros(3)]}, "does not belong to this run"),
        ({"momenta": 7}, "does not belong to this run"),
        ({"done_steps": 2, "sums": "none"}, "does not belong to this run"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_in_words(
    change: dict[str, Any], complaint: str, small_recipe: Recipes, run: RunFolder
) -> None:
    state = run.load_checkpoint()
    assert state is not None
    save_checkpoint(run.checkpoints, state | change)
    assert complaint in refusal(small_recipe, run)


@pytest.mark.parametrize("missing", ["model", "momenta", "rule", "average", "done_epochs"])
def test_a_checkpoint_without_one_of_its_parts_is_refused(missing: str, small_recipe: Recipes, run: RunFolder) -> None:
    state = run.load_checkpoint()
    assert state is not None
    del state[missing]
    save_checkpoint(run.checkpoints, state)
    if missing == "average":  # there is none in this run
        run_pipeline(small_recipe(*EPOCHS), run.path)
    else:
        assert missing in refusal(small_recipe, run)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("__import__('os').abort()", "not valid JSON"),
        ('{"format": "other"}', "format: must be 'strucspars-plan', got 'other'"),
        (None, "plan.json is missing, but the finetuning has begun; restore it"),
    ],
)
def test_a_plan_that_is_none_is_refused(
    text: str | None, complaint: str, small_recipe: Recipes, run: RunFolder
) -> None:
    if text is None:
        run.plan_path.unlink()
    else:
        run.plan_path.write_text(text)
    assert complaint in refusal(small_recipe, run)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "selection.json: is not valid JSON"),
        (b'"a string"', "selection.json: must be an object, got 'a string'"),
        (b"\xff", "selection.json is not UTF-8 text"),
        (None, "selection.json is missing, but the finetuning has begun; restore it"),
    ],
)
def test_a_selection_that_is_none_is_refused(
    content: bytes | None, complaint: str, small_recipe: Recipes, tmp_path: Path
) -> None:
    options = ("model.name=small_networks:slimmable", "kind=slimming", "slimming.target=0.5", *EPOCHS)
    questions = iter(range(100))
    with pytest.raises(RunInterrupted):
        run_pipeline(small_recipe(*options), tmp_path / "run", should_stop=lambda: next(questions) >= 13)
    path = tmp_path / "run" / "selection.json"
    assert ChannelSelection.from_json(path.read_text()).kept_channels > 0
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        run_pipeline(small_recipe(*options), tmp_path / "run")


def stopped_in_finetuning(recipe: Recipe, path: Path) -> RunFolder:
    questions = iter(range(100))
    with pytest.raises(RunInterrupted, match="after epoch 1 of finetune"):
        run_pipeline(recipe, path, should_stop=lambda: next(questions) >= 13)
    return RunFolder(path)


def with_other_orders(layer: dict[str, Any]) -> dict[str, Any]:
    return layer | {"in_perm": layer["in_perm"][::2] + layer["in_perm"][1::2]}


def with_another_level(layer: dict[str, Any]) -> dict[str, Any]:
    return layer | {"group_level": 2 if layer["group_level"] == 3 else 3}


def change_plan(run: RunFolder, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    plan = json.loads(run.plan_path.read_text())
    plan["layers"] = {name: change(layer) for name, layer in plan["layers"].items()}
    run.plan_path.write_text(json.dumps(plan))


@pytest.mark.parametrize("change", [with_other_orders, with_another_level])
@pytest.mark.parametrize("form", ["masked", "grouped"])
def test_finetuning_does_not_go_on_with_another_plan_and_leaves_the_folder_as_it_was(
    form: str, change: Callable[[dict[str, Any]], dict[str, Any]], small_recipe: Recipes, tmp_path: Path
) -> None:
    recipe = small_recipe(*EPOCHS, f"finetune.form={form}")
    run = stopped_in_finetuning(recipe, tmp_path / "run")
    plan = run.plan_path.read_text()
    change_plan(run, change)
    before = contents(run.path)
    words = f"finetune began with other contents of {run.plan_path}, so it would become another run; restore them, or"
    with pytest.raises(ValueError, match=re.escape(words)):
        run_pipeline(recipe, run.path)
    assert contents(run.path) == before
    run.plan_path.write_text(plan)
    run_pipeline(recipe, run.path)


def test_finetuning_does_not_go_on_with_other_channels_than_slimming_kept(
    small_recipe: Recipes, tmp_path: Path
) -> None:
    recipe = small_recipe("model.name=small_networks:slimmable", "kind=slimming", "slimming.target=0.5", *EPOCHS)
    run = stopped_in_finetuning(recipe, tmp_path / "run")
    path = run.path / "selection.json"
    selection = json.loads(path.read_text())
    # As many as before, so that all weights have their shapes.
    norm = next(norm for norm in selection["norms"].values() if len(norm["kept"]) < norm["width"])
    others = [channel for channel in range(norm["width"]) if channel not in norm["kept"]]
    norm["kept"] = sorted([*norm["kept"][1:], others[0]])
    path.write_text(json.dumps(selection))
    with pytest.raises(ValueError, match=re.escape(f"finetune began with other contents of {path}, so")):
        run_pipeline(recipe, run.path)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["nonsense", "{}", "{}"], "metrics.jsonl, line 1: is not valid JSON"),
        (["{}", "[1]", "{}"], "metrics.jsonl, line 2: must be a JSON object"),
        (["{}"], "has 1 whole rows, but the checkpoint was made after 3"),
    ],
)
def test_damaged_metrics_are_refused(lines: list[str], complaint: str, small_recipe: Recipes, run: RunFolder) -> None:
    run.metrics_path.write_text("".join(f"{line}\n" for line in lines))
    assert complaint in refusal(small_recipe, run)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "not valid JSON"), ("[]", "must be an object"), ('{"version": 1}', "is missing")],
)
def test_a_summary_that_is_none_is_refused(text: str, complaint: str, small_recipe: Recipes, run: RunFolder) -> None:
    run.summary_json_path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        run_pipeline(small_recipe(*EPOCHS), run.path)


def test_a_decision_that_is_none_is_refused(small_recipe: Recipes, tmp_path: Path) -> None:
    recipe = small_recipe(*EPOCHS, "finetune.form=auto")
    questions = iter(range(100))
    with pytest.raises(RunInterrupted):
        run_pipeline(recipe, tmp_path / "run", should_stop=lambda: next(questions) >= 13)
    run = RunFolder(tmp_path / "run")
    run.decisions_path.write_text(json.dumps({"finetune_form": "os.system"}))
    assert "finetune_form: must be one of masked, grouped or null, got 'os.system'" in refusal(
        small_recipe, run, "finetune.form=auto"
    )


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"model": {}}, "belongs to another network"),
        ({"other": 1}, "belongs to another network"),
        (None, "is not a run that has finished its first stage"),
    ],
)
def test_a_first_stage_of_another_network_is_refused(
    state: dict[str, Any] | None, complaint: str, small_recipe: Recipes, run: RunFolder, tmp_path: Path
) -> None:
    if state is None:
        (run.checkpoints / "sparsified.pt").unlink()
    else:
        save_named(run.checkpoints, "sparsified", state)
    with pytest.raises(ValueError, match=f"sparsify.from_run.*{complaint}.*; .*, or ") as caught:
        run_pipeline(small_recipe(*EPOCHS, f"sparsify.from_run={run.path}"), tmp_path / "new")
    # However many tensors a network has.
    assert len(str(caught.value)) < 700


def test_a_first_stage_that_would_execute_something_is_refused(
    small_recipe: Recipes, run: RunFolder, tmp_path: Path
) -> None:
    proof = tmp_path / "executed"
    buffer = io.BytesIO()
    torch.save({"model": Trap(proof)}, buffer)
    write_raw_checkpoint(run.checkpoints / "sparsified.pt", buffer.getvalue())
    with pytest.raises(ValueError, match="holds more than data"):
        run_pipeline(small_recipe(*EPOCHS, f"sparsify.from_run={run.path}"), tmp_path / "new")
    assert not proof.exists()


@pytest.mark.parametrize(
    ("recipe_text", "complaint"),
    [
        ("name: !!python/object/apply:os.abort []", "not valid YAML"),
        (None, "is not the folder of a finished run"),
    ],
)
def test_a_hostile_or_missing_teacher_is_refused_before_anything_is_trained(
    recipe_text: str | None, complaint: str, small_recipe: Recipes, run: RunFolder, tmp_path: Path
) -> None:
    run.model_path.write_bytes(b"anything")
    run.summary_json_path.write_text("{}")
    if recipe_text is None:
        run.recipe_path.unlink()
    else:
        run.recipe_path.write_text(recipe_text)
    with pytest.raises(ValueError, match=complaint):
        run_pipeline(small_recipe(f"finetune.teacher={run.path}"), tmp_path / "new")
    assert RunFolder(tmp_path / "new").metrics() == []


LINKS = ("model.safetensors", "model.onnx", "summary.json", "environment.json", "checkpoints", "tensorboard", "report")


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("leads_somewhere", [True, False])
def test_a_link_in_a_run_folder_is_refused_and_what_it_leads_to_stays(
    name: str, leads_somewhere: bool, small_recipe: Recipes, run: RunFolder, tmp_path: Path
) -> None:
    place = run.path / name
    if place.exists():
        place.rename(tmp_path / "elsewhere")
    elif leads_somewhere:
        (tmp_path / "elsewhere").write_text("precious")
    if not leads_somewhere and (tmp_path / "elsewhere").exists():
        (tmp_path / "elsewhere").rename(tmp_path / "away")
    place.symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path)
    words = f"^{re.escape(str(place))} is a link, which a run folder must not hold: .*; replace it by a copy, or delete"
    for attempt in (
        lambda: run_pipeline(small_recipe(*EPOCHS), run.path),
        lambda: export_network(find_target(str(run.path), model=None), format="onnx", force=True),
        lambda: read_run(run.path),
    ):
        with pytest.raises(ValueError, match=words):
            attempt()
    assert contents(tmp_path) == before
    assert place.is_symlink()


def test_a_link_below_a_folder_of_the_run_is_replaced_not_followed(
    small_recipe: Recipes, run: RunFolder, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("precious")
    for name in ("checkpoints/previous.pt", "dynamics/sparsify-0001.npz"):
        (run.path / name).unlink()
        (run.path / name).symlink_to(foreign)
    run_pipeline(small_recipe(*EPOCHS), run.path)
    assert foreign.read_text() == "precious"


def test_a_recipe_in_a_run_folder_takes_nothing_from_elsewhere(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("name: a secret")
    run.recipe_path.write_text(f"base: {tmp_path / 'private'}")
    with pytest.raises(ValueError, match=r"recipe\.yaml: base: a run folder's recipe takes no base"):
        run.load_recipe()
    with pytest.raises(ValueError, match="takes no base"):
        read_run(run.path)


FILES = (
    *("recipe.yaml", "environment.json", "plan.json", "metrics.jsonl", "decisions.json", "classes.json"),
    *("summary.json", "bench.json", "model.safetensors"),
    *("checkpoints/last.pt", "dynamics/sparsify-0001.npz", "importance/start.npz"),
)


@pytest.mark.parametrize("name", FILES)
def test_a_named_pipe_or_a_link_to_a_device_in_place_of_a_file_hangs_nothing(
    name: str, small_recipe: Recipes, run: RunFolder
) -> None:
    place = run.path / name
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    # A report reads no network and no names of classes, and of two checkpoints the one that is whole.
    if name not in ("model.safetensors", "classes.json", "checkpoints/last.pt"):
        with pytest.raises((OSError, ValueError), match=rf"{name}.* it is a pipe, a socket or a device"):
            read_run(run.path)
    if name in ("plan.json", "metrics.jsonl", "classes.json", "summary.json"):
        assert "it is a pipe, a socket or a device; give a regular file" in refusal(small_recipe, run)
    if "/" in name and not name.startswith("checkpoints"):
        place.unlink()
        place.symlink_to("/dev/zero")
        with pytest.raises((OSError, ValueError), match="it is a pipe, a socket or a device"):
            read_run(run.path)


def test_a_small_checkpoint_that_becomes_a_large_one_is_refused(run: RunFolder, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"version": 1, "model": torch.zeros(2**22)}, buffer)
    packed = io.BytesIO()
    with zipfile.ZipFile(buffer) as stored, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as deflated:
        for entry in stored.namelist():
            deflated.writestr(entry, stored.read(entry))
    assert len(packed.getvalue()) < 2**18
    for name in ("last.pt", "previous.pt"):
        write_raw_checkpoint(run.checkpoints / name, packed.getvalue())
    with pytest.raises(ValueError, match="its entries are packed"):
        run.load_checkpoint()
