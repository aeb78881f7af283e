"""`strucspars run`: run recipes, several at a time, with progress; a signal stops them with their state saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from strucspars.cli import console
from strucspars.cli.errors import Interrupted, StopRequest, explained
from strucspars.cli.export import (
    IMAGES,
    MAX_DROP,
    complete_format,
    export_document,
    export_network,
    int8_options,
)
from strucspars.train.observer import RunFailed

if TYPE_CHECKING:
    from strucspars.train.outcome import RunSummary
    from strucspars.train.recipe import Recipe
    from strucspars.train.run_folder import RunFolder

Outcomes: TypeAlias = "Mapping[Path, RunSummary | Exception]"

WIDTH = 100
FINISHED = "finished"
NOT_BEGUN = "not begun"
EXAMPLES = console.examples(
    "strucspars run demo",
    "strucspars run cifar10-resnet56-60 data.root=~/cifar10 --seeds 0,1,2 --jobs 3",
    "strucspars run my-recipe.yaml sparsify.target=0.7 --export onnx --out runs/seventy",
    "strucspars run my-recipe.yaml model.weights=trained.pth stage1.epochs=0 stage2.epochs=40",
    "strucspars run --options",
    "torchrun --nproc-per-node 2 -m strucspars run imagenet-resnet50-65 data.root=/imagenet",
)


def option_list() -> str:
    """Every option as `key=default`, as on the command line, with its allowed values and its meaning.

    >>> print("\\n".join(option_list().splitlines()[-2:]))
      engine.solver_workers=null    a whole number or null
          processes that learn the channel orders; `null` for some on a GPU, none on a CPU.
    """
    from strucspars.train.recipe_reading import option_groups

    sections = []
    for section in option_groups():
        lines = [fill(": ".join(filter(None, (", ".join(section.names), section.summary))), WIDTH)]
        for option in section.options:
            defaults = zip(option.keys, option.defaults, strict=True)
            changes = ", ".join("=".join(filter(None, (key, default))) for key, default in defaults)
            lines.append(f"  {changes}    {option.allowed}\n{indent(fill(option.meaning, WIDTH), ' ' * 6)}")
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _show_options(wanted: bool) -> None:
    if wanted:
        print(option_list())
        raise typer.Exit


def run(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A recipe of the package, or a YAML file.", autocompletion=console.complete_recipe
        ),
    ],
    overrides: console.Overrides = None,
    out: Annotated[
        Path | None,
        console.path_option(
            "The run folder; for several seeds, the folder to put theirs in.",
            "runs/NAME, with -seedS for a seed that is not 0",
        ),
    ] = None,
    seeds: console.Seeds = None,
    jobs: console.Jobs = 1,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Export the finished network, into the run folder: onnx, openvino, torch, or package.module:exporter.",
            autocompletion=complete_format,
        ),
    ] = None,
    int8: console.Int8 = False,
    options: Annotated[
        bool,
        typer.Option(
            "--options", callback=_show_options, is_eager=True, help="Show what KEY=VALUE can change and exit."
        ),
    ] = False,
    quiet: console.Quiet = False,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Train, compress, finetune, evaluate and save a network as a recipe says. Resumes a stopped run."""
    from strucspars.cli.networks import find_target
    from strucspars.export.checked import find_exporter
    from strucspars.export.int8 import Int8Writer
    from strucspars.paper.experiments import FinishedRun
    from strucspars.report.tables import beside_the_paper
    from strucspars.train.outcome import outcome_text, outcomes_text
    from strucspars.train.run_folder import RunFolder

    output = console.Output(as_json=as_json, quiet=quiet)
    if int8 and export is None:
        raise ValueError("--int8 is for an exported file; name its format with --export onnx or --export openvino")
    if export is not None:
        find_exporter(export).runtime()  # is it installed?
    if export is not None and int8:
        Int8Writer.of(find_exporter(export), [], format=export)  # has it int8 files?
    wanted = seeded_recipes(recipe, overrides or [], console.parse_seeds(seeds))
    if out is not None and len(wanted) == 1:
        recipes = {out: wanted[0]}
    else:
        recipes = {(out or Path("runs")) / run_name(each): each for each in wanted}
    outcomes = run_all(recipes, jobs=jobs, output=output)
    finished = finished_runs(outcomes)
    texts = [outcome_text(summary, recipes[path], RunFolder(path)) for path, summary in finished.items()]
    if len(recipes) > 1 and finished:
        texts = [outcomes_text(finished)]
    texts += beside_the_paper(FinishedRun(path, recipes[path], summary) for path, summary in finished.items())
    exported: list[dict[str, Any]] = []
    failure: Exception | None = None
    try:
        if export is not None and console.is_first_process():
            for path in finished:
                # Where the network is a function, the user has named it in the recipe of this command.
                found = find_target(str(path), model=recipes[path].model.name)
                wanted_int8 = partial(int8_options, found, None, None, images=IMAGES, max_drop=MAX_DROP)
                report = export_network(
                    found, format=export, quantize=wanted_int8 if int8 else lambda: None, force=True
                )
                texts.append(str(report))
                exported.append(export_document(report))
    except Exception as error:
        failure = error  # the outcome of the training is printed before it
    document = {
        "runs": [{"folder": str(path), "summary": summary.to_json()} for path, summary in finished.items()],
        "failed": [{"folder": str(path), "error": reason} for path, reason in failed_runs(outcomes).items()],
        "exported": exported,
    }
    output.outcome("\n\n".join(texts), document)
    raise_failures(outcomes, of_export=failure)


def run_state(folder: RunFolder) -> str:
    """The progress of the run in a folder, in words; without a recipe it has not begun."""
    from strucspars.train.outcome import progress_words, read_metrics
    from strucspars.train.run_folder import ONE_SHOT_STATE

    if not folder.recipe_path.is_file():
        return NOT_BEGUN
    if folder.summary_json_path.is_file():
        return FINISHED
    if folder.is_one_shot:
        return ONE_SHOT_STATE
    rows = read_metrics(folder)
    if not rows:
        return "in its first epoch" if folder.is_begun else NOT_BEGUN
    return progress_words(folder.load_recipe(), rows)


def run_name(recipe: Recipe) -> str:
    """The name of a run, and of its folder by default: that of the recipe, and the seed unless it is 0.

    >>> from strucspars.train.recipe import Recipe
    >>> run_name(Recipe(name="demo")), run_name(Recipe(name="demo", seed=2))
    ('demo', 'demo-seed2')
    """
    if recipe.name in (".", "..") or any(sign in recipe.name for sign in "/\\\0"):
        raise ValueError(
            f"name: {recipe.name!r} cannot name a run folder: it must be one part of a path, without / or \\; "
            "change it in the recipe, or with name=..."
        )
    return recipe.name if recipe.seed == 0 else f"{recipe.name}-seed{recipe.seed}"


def seeded_recipes(source: str, overrides: Sequence[str], seeds: Sequence[int] | None) -> list[Recipe]:
    """The recipe once per seed; with its own seed if none is given."""
    from strucspars.train.recipe_reading import read_recipe

    if seeds is None:
        return [read_recipe(source, overrides)]
    return [read_recipe(source, [*overrides, f"seed={seed}"]) for seed in seeds]


def run_all(recipes: Mapping[Path, Recipe], *, jobs: int, output: console.Output) -> Outcomes:
    """Run or resume recipes in their folders; returns the summary or the error of each.

    A failed run stops only those that build on it. A signal raises `Interrupted`.
    """
    from strucspars.train.run import RunInterrupted
    from strucspars.train.run_folder import RunFolder
    from strucspars.train.side_by_side import run_side_by_side, wanted_workers
    from strucspars.train.solver_pool import solver_pool

    if jobs > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"--jobs {jobs} is for one process; under torchrun, runs are started one after the other")
    for path in recipes:
        folder, state = RunFolder(path), run_state(RunFolder(path))
        words = {FINISHED: f"{path} is finished already", NOT_BEGUN: f"starting in {path}"}
        # The run itself refuses other folders.
        if not folder.is_one_shot and (state != FINISHED or folder.model_path.is_file()):
            output.remark(words.get(state, f"resuming in {path}: {state}"))
    with (
        StopRequest() as stop,
        solver_pool(max(wanted_workers(recipe.engine) for recipe in recipes.values())) as executor,
        console.RunProgress(output.console, quiet=output.is_quiet) as progress,
    ):

        def should_stop() -> bool:
            if stop():
                progress.stopping()
            return stop()

        outcomes = run_side_by_side(
            recipes, jobs=jobs, observers=[progress], should_stop=should_stop, executor=executor
        )
    interrupted = {path: error for path, error in outcomes.items() if isinstance(error, RunInterrupted)}
    if interrupted:
        # A process that torchrun stops has received no signal of its own.
        number = signal.SIGTERM if stop.signal_number is None else stop.signal_number
        lines = [f"stopped by {signal.Signals(number).name}; everything so far is saved:"]
        lines += [f"  {path}: {error}" for path, error in interrupted.items()]
        failed = failed_runs(outcomes).items()
        lines += [f"  {path} failed before: {reason}" for path, reason in failed if path not in interrupted]
        raise Interrupted("\n".join(lines), number)
    output.remark("")
    return outcomes


def finished_runs(outcomes: Outcomes) -> dict[Path, RunSummary]:
    """The summaries of the finished runs."""
    return {path: outcome for path, outcome in outcomes.items() if not isinstance(outcome, Exception)}


def failed_runs(outcomes: Outcomes) -> dict[Path, str]:
    """The failed runs, and why they failed."""
    return {path: _reason(outcome) for path, outcome in outcomes.items() if isinstance(outcome, Exception)}


def raise_failures(outcomes: Outcomes, *, of_export: Exception | None = None) -> None:
    """Raise the error of the runs if all failed for one reason, else one that names every failed run and why."""
    from strucspars.train.side_by_side import BaseRunFailed

    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
    if not errors:
        if of_export is not None:
            raise of_export
        return
    # A run that could not begin because of another one shares the reason of that one.
    causes = {_reason(error): error for error in errors if not isinstance(error, BaseRunFailed)}
    if len(errors) == len(outcomes) and len(causes) == 1:
        raise next(iter(causes.values()))
    paths: dict[str, list[str]] = {}
    for path, reason in failed_runs(outcomes).items():
        paths.setdefault(reason, []).append(str(path))
    failures = "; ".join(f"{', '.join(runs)}: {reason}" for reason, runs in paths.items())
    also = "" if of_export is None else f"; and not all others could be exported: {_reason(of_export)}"
    raise RunFailed(f"{len(errors)} of {len(outcomes)} runs failed: {failures}{also}") from errors[0]


def _reason(error: Exception) -> str:
    explanation = explained(error)
    return f"{type(error).__name__}: {error}" if explanation is None else explanation[0]
