"""The list of all options is whole, and says what the code does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strucspars.nn.groupable import LayerRules
from strucspars.sparsify.config import SparsifyConfig, SparsifyOptions
from strucspars.train.recipe import (
    DataRecipe,
    EngineRecipe,
    FinetuneRecipe,
    ModelRecipe,
    Recipe,
    SlimmingRecipe,
    SparsifyRecipe,
    StageRecipe,
)
from strucspars.train.recipe_reading import (
    Option,
    attribute_meanings,
    flat_options,
    meaning_of,
    option_groups,
    read_recipe,
)

DESCRIBED = (
    DataRecipe,
    EngineRecipe,
    FinetuneRecipe,
    ModelRecipe,
    Recipe,
    SlimmingRecipe,
    LayerRules,
    SparsifyConfig,
    SparsifyOptions,
    SparsifyRecipe,
    StageRecipe,
)
DEFAULT = Recipe(name="any")


def listed() -> list[Option]:
    return [option for section in option_groups() for option in section.options]


def option_of(key: str) -> Option:
    (found,) = (option for option in listed() if key in option.keys)
    return found


def test_every_key_of_a_recipe_is_listed_once() -> None:
    keys = [key for option in listed() for key in option.keys]
    assert sorted(keys) == sorted(flat_options(DEFAULT))


def test_the_listed_defaults_make_the_default_recipe(tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    path.write_text("{}")
    pairs = [pair for option in listed() for pair in zip(option.keys, option.defaults, strict=True)]
    assert [key for key, default in pairs if not default] == ["name"]
    # One by one as well as all together: alone, the others are the code's.
    overrides = [f"{key}={default}" for key, default in pairs if default]
    assert read_recipe(path, overrides) == DEFAULT
    for override in overrides:
        assert read_recipe(path, [override]) == DEFAULT, override


def test_the_stages_share_meanings_and_have_their_own_defaults() -> None:
    epochs = option_of("stage2.epochs")
    assert epochs.keys == ("stage1.epochs", "stage2.epochs")
    assert epochs.defaults == (str(DEFAULT.stage1.epochs), str(DEFAULT.stage2.epochs)) == ("100", "160")


def test_a_section_of_several_names_says_what_each_is_for() -> None:
    (stages,) = (section for section in option_groups() if len(section.names) > 1)
    for name in stages.names:
        assert f"`{name}` is {attribute_meanings(Recipe)[name]}" in stages.summary


def test_inherited_options_have_the_meaning_of_the_class_that_defines_them() -> None:
    assert option_of("sparsify.target").meaning == attribute_meanings(SparsifyOptions)["target"]
    assert option_of("sparsify.exclude").meaning == attribute_meanings(LayerRules)["exclude"]


def test_none_is_called_by_the_name_that_yaml_has_for_it() -> None:
    assert "None for fresh weights" in attribute_meanings(ModelRecipe)["weights"]
    assert "`null` for fresh weights" in option_of("model.weights").meaning
    assert not [option.keys for option in listed() if "None" in option.meaning]


@pytest.mark.parametrize("options", DESCRIBED, ids=lambda options: options.__name__)
def test_docstrings_describe_the_options_that_there_are(options: type[Any]) -> None:
    assert set(attribute_meanings(options)) == set(vars(options).get("__annotations__", {})) - {"_"}


@dataclass(frozen=True)
class HalfDescribed:
    """Some options.

    Attributes:
        told: something, at length
            and over two lines.
        empty:
    """

    told: int = 0
    empty: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class Undescribed:
    told: int = 0


def test_meanings_may_take_several_lines() -> None:
    assert meaning_of(HalfDescribed, "told") == "something, at length and over two lines."


@pytest.mark.parametrize(
    ("options", "name"), [(HalfDescribed, "empty"), (HalfDescribed, "left_out"), (Undescribed, "told")]
)
def test_an_option_that_nobody_described_is_an_error(options: type, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{options.__name__}\.{name} has no meaning; describe it"):
        meaning_of(options, name)
