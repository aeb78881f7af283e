import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strucspars.train.recipe import (
    Ablation,
    DataRecipe,
    EngineRecipe,
    FinetuneRecipe,
    ModelRecipe,
    Precision,
    Recipe,
    Schedule,
    SlimmingRecipe,
    SparsifyRecipe,
    StageRecipe,
)
from strucspars.train.recipe_reading import read_recipe, recipe_names, recipe_yaml


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def complaint(source: str | Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the callers look at the message
        read_recipe(source, overrides)
    return str(caught.value)


def from_literal(choices: object) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(choices))


texts = st.text(min_size=1, max_size=12) | st.text(min_size=100, max_size=200)
fractions = st.floats(0, 1)


@st.composite
def stages(draw: st.DrawFn) -> StageRecipe:
    return StageRecipe(
        epochs=draw(st.integers(1, 300)),
        lr=draw(st.floats(1e-9, 1e3)),
        momentum=draw(st.floats(0, 0.99)),
        weight_decay=draw(st.floats(0, 1)),
        schedule=draw(from_literal(Schedule)),
        lr_warmup=draw(st.floats(0, 0.99)),
        label_smoothing=draw(st.floats(0, 0.99)),
        ema=draw(st.none() | st.floats(0.01, 0.99)),
    )


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    sparsify = SparsifyRecipe(
        target=draw(st.floats(0, 0.99)),
        min_kept_norm=draw(fractions),
        controller="paper",
        lambda_step=draw(st.none() | st.floats(1e-12, 1)),
        lambda_warmup=draw(st.floats(0, 0.99)),
        fixed_levels=draw(st.dictionaries(texts, st.integers(1, 9), max_size=2)),
        include=tuple(draw(st.lists(texts, max_size=3))),
        exclude=tuple(draw(st.lists(texts, max_size=3))),
        layer_types=tuple(draw(st.lists(st.sampled_from(["Conv1d", "Conv2d", "Conv3d", "Linear"]), max_size=3))),
    )
    return Recipe(
        name=draw(texts.filter(lambda text: bool(text.strip()))),
        seed=draw(st.integers(0, 2**40)),
        data=draw(st.builds(DataRecipe, name=texts, root=st.none() | texts, batch_size=st.integers(2, 512))),
        model=draw(st.builds(ModelRecipe, name=texts, weights=st.none() | texts)),
        sparsify=sparsify,
        slimming=draw(st.builds(SlimmingRecipe, target=st.floats(0, 0.99), strength=fractions)),
        stage1=draw(stages()),
        finetune=draw(st.builds(FinetuneRecipe, ablation=from_literal(Ablation), distill_weight=fractions)),
        stage2=draw(stages()),
        engine=draw(st.builds(EngineRecipe, precision=from_literal(Precision), compile=st.booleans())),
    )


@settings(max_examples=40)
@given(recipes())
@example(Recipe(name="mine", data=DataRecipe(name="\x85")))
@example(Recipe(name="Größe ✓ \ufeff", data=DataRecipe(root="null"), model=ModelRecipe(weights="1e-3 # : \r\n")))
def test_a_written_recipe_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = written(tmp_path_factory.mktemp("recipe"), recipe_yaml(recipe), "another name.yaml")
    assert read_recipe(path) == recipe


def test_what_is_not_given_has_the_defaults_of_its_section(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, "stage2: {epochs: 30}\nstage1: {lr: 0.2}"))
    default = Recipe(name="mine")
    first, second = replace(default.stage1, lr=0.2), replace(default.stage2, epochs=30)
    assert recipe == replace(default, stage1=first, stage2=second)


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("sparsify: {controller: paper, lambda_step: 2e-6}", "lambda_step", 2e-6),  # text to YAML
        ("sparsify: {controller: paper, lambda_step: 1}", "lambda_step", 1.0),
        ("sparsify: {controller: paper, lambda_step: null}", "lambda_step", None),
        ("sparsify: {exclude: [conv1, '*.fc']}", "exclude", ("conv1", "*.fc")),
        ("sparsify: {layer_types: [Conv2d, Linear]}", "layer_types", ("Conv2d", "Linear")),
        ("sparsify: {exclude: []}", "exclude", ()),
        ("sparsify: {}", "target", 0.5),
        ("sparsify: {fixed_levels: {'layer1.*': 2}}", "fixed_levels", {"layer1.*": 2}),
    ],
)
def test_values_take_the_annotated_type(tmp_path: Path, line: str, key: str, value: object) -> None:
    found = getattr(read_recipe(written(tmp_path, line)).sparsify, key)
    assert found == value
    assert type(found) is type(value)


def test_a_choice_that_looks_like_a_number_needs_no_quotes(tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path, "engine: {precision: 16}")).engine.precision == "16"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stage1: {epochs: true}", ["stage1.epochs: must be a whole number, got True"]),
        ("stage1: {epochs: 3.0}", ["stage1.epochs: must be a whole number, got 3.0"]),
        ("stage1: {epochs: '3'}", ["stage1.epochs: must be a whole number, got '3'"]),
        ("stage1: {optimizer: adamw}", ["stage1.optimizer must be sgd, got 'adamw'", "stage2.optimizer"]),
        ("stage1: {lr: fast}", ["stage1.lr: must be a finite number, got 'fast'"]),
        ("stage1: {lr: .nan}", ["stage1.lr: must be a finite number, got nan"]),
        ("stage1: {lr: false}", ["stage1.lr: must be a finite number, got False"]),
        (f"stage1: {{lr: {'9' * 400}}}", ["stage1.lr: must be a finite number, got 9999"]),
        ("stage1: {lr: null}", ["stage1.lr: must be a finite number, got None"]),
        ("stage1: {ema: [1]}", ["stage1.ema: must be a finite number or null, got [1]"]),
        ("data: {download: 1}", ["data.download: must be true or false, got 1"]),
        ("name: 2024", ["name: must be text (numbers in quotes), got 2024"]),
        ("sparsify: {exclude: fc}", ["sparsify.exclude: must be a list, each text", "got 'fc'"]),
        ("sparsify: {fixed_levels: {a: b}}", ["sparsify.fixed_levels.a: must be a whole number"]),
        ("sparsify: {fixed_levels: {a: 0}}", ["sparsify.fixed_levels['a'] must be a whole number from 1 on, got 0"]),
        ("sparsify: {exclude: [1]}", ["sparsify.exclude[0]: must be text", "got 1"]),
        ("stage2: {schedule: step}", ["stage2.schedule: must be one of constant, steps, cosine, got 'step'"]),
        ("stage2: 5", ["stage2: must be an object, got 5"]),
        ("stage2:", ["stage2: must be an object, got None"]),
        ("seed: {}", ["seed: must be a whole number, got {}"]),
        ("stage1: {epoch: 3}", ["no key 'stage1.epoch' (value 3)", "did you mean 'stage1.epochs'?", "momentum"]),
        ("lr: 3", ["no key 'lr'", "did you mean 'stage1.lr'?"]),
        ("target: 0.5", ["no key 'target'", "did you mean 'sparsify.target'?"]),
        ("sparsfy: {target: 0.5}", ["no key 'sparsfy'", "did you mean 'sparsify'?"]),
        ("dta: {root: x}", ["no key 'dta'", "did you mean 'data'?"]),
        ("sparsify: {tagret: 0.5}", ["no key 'sparsify.tagret'", "did you mean 'sparsify.target'?"]),
        ("lambda_step: 3", ["did you mean 'sparsify.lambda_step'?"]),
        ("zebra: 3", ["no key 'zebra'", "Known here: name, kind, seed"]),
        ("1: 3", ["no key '1'"]),
        ("stage1.epochs: 3", ["no key 'stage1.epochs'", "nested, not dotted: stage1: {epochs: ...}"]),
        ("stage1: {epochs: 0}", ["stage1.epochs 0 groups the weights without training", "model.weights"]),
        ("stage1: {epochs: -7}", ["stage1.epochs must be a whole number from 0 on, got -7"]),
        ("stage2: {momentum: 1}", ["stage2.momentum must lie in [0, 1), got 1"]),
        ("sparsify: {target: 1.5}", ["sparsify.target is a removed fraction", "1.5"]),
        ("{kind: dense, sparsify: {target: 1.5}}", ["sparsify.target is a removed fraction", "1.5"]),
        ("data: {batch_size: 1}", ["data.batch_size must be a whole number from 2 on, got 1"]),
        ("{kind: dense, finetune: {ablation: random}}", ["finetune.ablation 'random' needs kind strucspars"]),
        ("name: ' '", ["name must not be empty"]),
        ("seed: 1\nkind: dense\nseed: 2", ["seed: is repeated in line 3"]),
        ("stage1: {epochs: 2, epochs: 3}", ["stage1.epochs: is repeated"]),
        ("- 1", ["must be a mapping of keys to values, got [1]"]),
        ("just text", ["must be a mapping of keys to values, got 'just text'"]),
        ("", ["the file is empty"]),
        ("# nothing", ["the file is empty"]),
        ("seed: [", ["is not valid YAML"]),
        ("seed: 1\n---\nseed: 2", ["is not valid YAML"]),
        ("seed: !!python/object/apply:os.getcwd []", ["is not valid YAML", "could not determine a constructor"]),
        ("[" * 1500, ["is not valid YAML"]),
        ("base: 3", ["base: must be a name or path, got 3"]),
        ("base: nowhere.yaml", ["base: there is no recipe 'nowhere.yaml'"]),
        ("base: dem", ["base: there is no recipe 'dem'", "did you mean 'demo'?"]),
    ],
)
def test_a_mistake_is_named_with_file_key_value_and_remedy(tmp_path: Path, line: str, words: list[str]) -> None:
    path = written(tmp_path, line)
    message = complaint(path)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_a_value_that_aliases_blow_up_is_named_briefly(tmp_path: Path) -> None:
    depth = 40
    lists = ["- &a0 [x, x]", *(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, depth))]
    path = written(tmp_path, "seed:\n" + "\n".join(lists))
    assert "seed: its aliases amount to more than 100,000 values" in complaint(path)
    assert "seed: its aliases amount to" in complaint(written(tmp_path, "seed: &a [*a]"))


def test_a_pipe_in_the_place_of_a_recipe_is_refused_at_once(tmp_path: Path) -> None:
    # Nothing ends a pipe whose other end never opens.
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "it is a pipe, a socket or a device; give a regular file" in complaint(tmp_path / "pipe.yaml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stage1.epochs", ["must be key=value"]),
        ("stage1.epoch=3", ["no key 'stage1.epoch'", "'stage1.epochs'"]),
        ("stage1.epochs=many", ["stage1.epochs: must be a whole number, got 'many'"]),
        ("stage1.epochs=", ["stage1.epochs: must be a whole number, got None"]),
        ("stage1=3", ["stage1: must be an object"]),
        ("seed.deep=3", ["seed: must be a whole number, got {'deep': 3}"]),
        ("=3", ["no key ''"]),
        ("base=demo", ["no key 'base'"]),
        ("sparsify.include=[*]", ["is not valid YAML", "in quotes"]),
        ("stage1={epochs: 1, epochs: 2}", ["is repeated"]),
        ("stage1.epochs=-1", ["stage1.epochs must be a whole number from 0 on, got -1"]),
        ("sparsify.target=2", ["sparsify.target is a removed fraction"]),
        ("stage1.lr_warmup=1", ["stage1.lr_warmup must lie in [0, 1)"]),
        (f"seed={2**63}", ["seed: must be a whole number, got 92233"]),
        (f"seed={'9' * 5000}", ["seed=999", "must have at most 1000 digits"]),
    ],
)
def test_a_mistake_in_an_override_names_the_override(tmp_path: Path, override: str, words: list[str]) -> None:
    message = complaint(written(tmp_path, "seed: 3"), (override,))
    assert message.startswith(f"override {override!r}: ")
    assert [word for word in words if word not in message] == []


def test_overrides_hold_over_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = written(tmp_path, "seed: 3\nstage1: {epochs: 40, lr: 0.3}\ndata: {root: here}")
    overrides = ["seed=4", "stage1.epochs=30", "sparsify.target=0.4", "data.root=~/cifar", "seed=5", "name=other"]
    recipe = read_recipe(path, [*overrides, "sparsify.exclude=['*.conv1', fc]", "stage2={lr: 1e-2}"])
    assert (recipe.seed, recipe.stage1.epochs, recipe.stage1.lr, recipe.sparsify.target) == (5, 30, 0.3, 0.4)
    assert (recipe.data.root, recipe.name, recipe.stage2.lr) == ("~/cifar", "other", 0.01)
    assert recipe.sparsify.exclude == ("*.conv1", "fc")
    assert read_recipe(path, ["data.root=null"]).data.root is None


def test_a_base_holds_where_a_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    written(tmp_path, "name: first\nseed: 1\nstage1: {epochs: 50, lr: 0.5, momentum: 0.5}", "first.yaml")
    written(tmp_path, "base: ../first.yaml\nseed: 3\nstage1: {epochs: 60}", "deeper/second.yaml")
    recipe = read_recipe(written(tmp_path, "base: deeper/second.yaml\nstage1: {momentum: 0.7}", "top.yaml"))
    assert (recipe.name, recipe.seed) == ("top", 3)
    assert (recipe.stage1.epochs, recipe.stage1.lr, recipe.stage1.momentum) == (60, 0.5, 0.7)


def test_a_base_may_be_a_recipe_of_the_package(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, "base: cifar10-resnet56-60\nseed: 7"))
    assert recipe == replace(read_recipe("cifar10-resnet56-60"), name="mine", seed=7)


def test_a_mistake_in_a_base_names_the_base(tmp_path: Path) -> None:
    base = written(tmp_path, "stage1: {epochs: 0}", "base.yaml")
    assert complaint(written(tmp_path, "base: base.yaml")).startswith(f"{base}: stage1.epochs")


def test_bases_in_a_circle_are_an_error(tmp_path: Path) -> None:
    written(tmp_path, "base: mine.yaml", "common.yaml")
    assert "circle" in complaint(written(tmp_path, "base: common.yaml"))
    assert "circle" in complaint(written(tmp_path, "base: self.yaml", "self.yaml"))


def test_a_chain_of_bases_has_an_end(tmp_path: Path) -> None:
    for number in range(102):
        written(tmp_path, f"base: {number + 1}.yaml", f"{number}.yaml")
    written(tmp_path, "seed: 7", "101.yaml")
    assert "101.yaml: a recipe may have at most 100 bases" in complaint(tmp_path / "0.yaml")
    assert read_recipe(tmp_path / "1.yaml").seed == 7


@pytest.mark.parametrize(("source", "near"), [("cifar10-resnet20-2", "cifar10-resnet20-20"), ("demo.yml", "demo")])
def test_a_missing_recipe_is_an_error_with_the_nearest_name(source: str, near: str) -> None:
    message = complaint(source)
    assert repr(source) in message
    assert f"did you mean {near!r}?" in message
    assert "those of the package are" in complaint("qqqq")


def test_what_cannot_be_read_as_text_is_an_error(tmp_path: Path) -> None:
    assert "this is a folder, not a recipe" in complaint(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00seed")
    assert "is not UTF-8 text" in complaint(binary)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path, "\ufeffseed: 3")).seed == 3


def test_a_name_of_the_package_goes_before_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "seed: 77", "demo")
    assert read_recipe("demo").seed != 77
    assert read_recipe(Path("demo")).seed == 77
    written(tmp_path, "seed: 78", "own")
    assert read_recipe("own").seed == 78


@pytest.mark.parametrize(("epochs", "warmups"), [(1, (0, 0)), (2, (0, 0)), (6, (1, 0)), (60, (6, 4)), (100, (10, 6))])
def test_warmups_are_fractions_of_their_stages(epochs: int, warmups: tuple[int, int]) -> None:
    recipe = read_recipe("cifar10-resnet20-40", [f"stage1.epochs={epochs}", f"stage2.epochs={epochs}"])
    schedule = recipe.sparsify_config(steps_per_epoch=1).penalty_schedule
    assert (schedule.warmup_epochs, recipe.stage2.lr_warmup_epochs) == warmups
    assert "sparsify.lambda_warmup must be below 1" in complaint("demo", ("sparsify.lambda_warmup=1",))


def test_names_of_the_package_are_sorted_and_without_bases() -> None:
    names = recipe_names()
    assert names == sorted(set(names))
    assert {"demo", "demo-dense", "cifar10-resnet20-40", "imagenet-densenet201-60"} <= set(names)
    assert not [name for name in names if name.startswith("_")]
