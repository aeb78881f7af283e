"""`strucspars run`: a recipe becomes a finished run folder."""

from pathlib import Path
from textwrap import fill, indent
from typing import Annotated

import typer

from strucspars.cli.console import (
    Debug,
    Jobs,
    Json,
    Output,
    Overrides,
    Quiet,
    Seeds,
    examples,
    from_home,
    is_first_process,
    parsed_seeds,
)
from strucspars.cli.export import FileFormat
from strucspars.train.recipe_options import Option, Section, recipe_sections

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


EXAMPLES = examples(
    "strucspars run demo",
    "strucspars run cifar10-resnet56-60 data.root=~/cifar10 --seeds 0,1,2 --jobs 3",
    "strucspars run my-recipe.yaml sparsify.target=0.7 --export onnx --out runs/seventy",
    "strucspars run my-recipe.yaml model.weights=trained.pth stage1.epochs=0 stage2.epochs=40",
    "strucspars run --options",
    "torchrun --nproc-per-node 2 -m strucspars run imagenet-resnet50-65 data.root=/imagenet",
)


def _recipe_names(incomplete: str) -> list[str]:
    from strucspars.train.recipe_reading import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def _show_options(wanted: bool) -> None:
    if wanted:
        from strucspars.cli.run import option_list

        print(option_list())
        raise typer.Exit


def run(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe of the package, or a YAML file.", autocompletion=_recipe_names),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run folder; for several seeds, the folder to put theirs in.",
            show_default="runs/NAME, with -seedS for a seed that is not 0",
            callback=from_home,
        ),
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    export: Annotated[
        FileFormat | None,
        typer.Option(help="Export the finished network, into the run folder.", show_default=False),
    ] = None,
    options: Annotated[
        bool,
        typer.Option(
            "--options", callback=_show_options, is_eager=True, help="Show what KEY=VALUE can change and exit."
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train, compress, finetune, evaluate and save, as a recipe says. Goes on where an earlier run was stopped."""
    from strucspars.cli.export import check_runtime, document, exported_runs
    from strucspars.cli.running import finished_runs, raise_failures, run_all, run_name, runs_document, seeded_recipes
    from strucspars.export.checked import ExportReport
    from strucspars.train.outcome_text import outcome_text, outcomes_text
    from strucspars.train.run_folder import RunFolder

    output = Output(as_json=as_json, quiet=quiet)
    if export is not None:
        check_runtime(export.value)
    wanted = seeded_recipes(recipe, overrides or [], None if seeds is None else parsed_seeds(seeds))
    if out is not None and len(wanted) == 1:
        recipes = {out: wanted[0]}
    else:
        recipes = {(out or Path("runs")) / run_name(each): each for each in wanted}
    outcomes = run_all(recipes, jobs=jobs, output=output)
    finished = finished_runs(outcomes)
    texts = [outcome_text(summary, recipes[path], RunFolder(path)) for path, summary in finished.items()]
    text = outcomes_text(finished) if finished and len(recipes) > 1 else "".join(texts)
    reports: list[ExportReport] = []
    failure: Exception | None = None
    try:
        if export is not None and is_first_process():
            # One by one, so that those before a failure are there.
            reports.extend(exported_runs({path: recipes[path] for path in finished}, export.value))
    except Exception as error:
        # What was trained is told first, whatever becomes of its files.
        failure = error
    exported = {"exported": [document(report) for report in reports]}
    output.outcome("\n\n".join((text, *map(str, reports))), runs_document(outcomes) | exported)
    raise_failures(outcomes, of_export=failure)
