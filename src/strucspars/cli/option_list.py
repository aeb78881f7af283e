"""The options of recipes, to read in a terminal."""

from textwrap import fill, indent

from strucspars.training.recipe_options import Option, Section, recipe_sections

WIDTH = 100


def option_list() -> str:
    """Every option as `key=default`, the way to change it, with what it may be and what it means.

    >>> print("\\n".join(option_list().splitlines()[-2:]))
      engine.solver_workers=null    a whole number or null
          processes that learn the channel orders; `null` for some on a GPU, none on a CPU.
    """
    return "\n\n".join(_section_text(section) for section in recipe_sections())


def _section_text(section: Section) -> str:
    title = fill(": ".join(filter(None, (", ".join(section.names), section.summary))), WIDTH)
    return "\n".join((title, *(_option_text(option) for option in section.options)))


def _option_text(option: Option) -> str:
    defaults = zip(option.keys, option.defaults, strict=True)
    changes = ", ".join("=".join(filter(None, (key, default))) for key, default in defaults)
    meaning = indent(fill(option.meaning, WIDTH), "    ")
    return indent(f"{changes}    {option.allowed}\n{meaning}", "  ")
