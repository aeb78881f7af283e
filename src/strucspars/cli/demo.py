"""`strucspars demo`: run the whole pipeline on the digits, and check what it promises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strucspars.cli import console
from strucspars.cli.export import export_document, export_network
from strucspars.cli.run import finished_runs, raise_failures, run_all, run_name, seeded_recipes
from strucspars.train.observer import RunFailed

if TYPE_CHECKING:
    from strucspars.export.checked import ExportReport
    from strucspars.train.outcome import RunSummary
    from strucspars.train.recipe import Recipe

LEAST_REMOVED = 0.5
MOST_LOST_ACCURACY = 0.01
# Accuracies such as 449/450 - 1/100 have no exact binary form.
ROUNDING = 1e-9
EXAMPLES = console.examples("strucspars demo", "strucspars demo --seeds 0,1,2 --out demo-runs")


def demo(
    overrides: console.Overrides = None,
    out: console.OutFolder = Path("runs"),
    seeds: console.Seeds = None,
    quiet: console.Quiet = False,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Train a small network on the embedded digits, compress it by half, and compare. Takes minutes on a laptop."""
    from strucspars.cli.networks import find_target
    from strucspars.report.page import write_report
    from strucspars.report.reading import read_run

    output = console.Output(as_json=as_json, quiet=quiet)
    dense, compressed = _recipes(overrides or [], console.parse_seeds(seeds), out)
    outcomes = run_all(dense | compressed, jobs=1, output=output)
    raise_failures(outcomes)
    summaries = finished_runs(outcomes)
    texts, documents, broken = [], [], []
    for dense_path, (path, recipe) in zip(dense, compressed.items(), strict=True):
        dense_run, run = summaries[dense_path], summaries[path]
        exported = export_network(find_target(str(path), model=recipe.model.name), format="onnx", force=True)
        promises = broken_promises(dense_run, run)
        texts.append(demo_text(dense_run, run, dense_path, path, exported, recipe))
        documents.append(
            {
                "dense": {"folder": str(dense_path), "summary": dense_run.to_json()},
                "compressed": {"folder": str(path), "summary": run.to_json()},
                "exported": export_document(exported),
                "broken_promises": promises,
            }
        )
        broken += promises
    runs = [read_run(folder) for pair in zip(compressed, dense, strict=True) for folder in pair]
    page = write_report(runs, out / "report").page
    texts.append(f"{page}  a report on what was learned, for a browser")
    output.outcome("\n\n".join(texts), {"demos": documents, "report": str(page)})
    if broken:
        raise RunFailed(f"the demo does not keep its promises: {'; '.join(broken)}")


def _recipes(
    overrides: Sequence[str], seeds: Sequence[int] | None, out: Path
) -> tuple[dict[Path, Recipe], dict[Path, Recipe]]:
    """The recipes of the dense runs and of the compressed ones, by folder."""
    from dataclasses import replace

    from strucspars.train.recipe_reading import override_keys

    for override in overrides:
        if "name" in override_keys(override):
            raise ValueError(f"{override!r}: the two runs of the demo have their own names; leave it out, or use --out")
    compressed = {out / run_name(recipe): recipe for recipe in seeded_recipes("demo", overrides, seeds)}
    if any(recipe.is_progressive for recipe in compressed.values()):
        raise ValueError(
            "the demo has two stages; try strucspars run demo sparsify.schedule=progressive stage2.epochs=31"
        )
    dense = {}
    for recipe, small in zip(seeded_recipes("demo-dense", overrides, seeds), compressed.values(), strict=True):
        # As many epochs as both stages of the compressed run, with overrides.
        epochs = small.stage1.epochs + small.stage2.epochs
        dense[out / run_name(recipe)] = replace(recipe, stage2=replace(recipe.stage2, epochs=epochs))
    return dense, compressed


def broken_promises(dense: RunSummary, compressed: RunSummary) -> list[str]:
    """What the demo promises and this run does not meet, in words."""
    from strucspars.cost.text_table import percent

    broken = []
    alone, target = compressed.removed_before_search, compressed.target
    if alone is None or target is None or alone < target / 2:
        words = f"sparse training alone removed {percent(alone) or 'nothing'}"
        broken.append(f"{words}, less than half of the target {percent(target)}")
    removed = compressed.removed_param_fraction
    if removed < LEAST_REMOVED - ROUNDING:
        broken.append(f"only {percent(removed)} of the parameters are removed, less than {percent(LEAST_REMOVED)}")
    top1, dense_top1 = compressed.finetuned.last_top1, dense.finetuned.last_top1
    if dense_top1 - top1 > MOST_LOST_ACCURACY + ROUNDING:
        lost = f"{100 * (dense_top1 - top1):.2f} points less than the dense one's {percent(dense_top1)}"
        broken.append(f"the compressed network has {percent(top1)}, {lost}; one point was allowed")
    return broken


def demo_text(
    dense: RunSummary, compressed: RunSummary, dense_path: Path, path: Path, exported: ExportReport, recipe: Recipe
) -> str:
    """The comparison, the files, and what to try next."""
    from strucspars.cost.text_table import Column, duration, percent, text_table

    networks, stages = (dense, compressed), (recipe.stage1.epochs, recipe.stage2.epochs)
    table = text_table(
        [
            Column(f"digits, seed {dense.seed}", ["dense", "compressed"], is_text=True),
            Column("params", [f"{each.params.after:,}" for each in networks]),
            Column("MACs", [f"{each.macs.after:,}" for each in networks]),
            Column("accuracy", [percent(each.finetuned.last_top1) for each in networks]),
            Column("epochs", [str(sum(stages)), f"{stages[0]} + {stages[1]}"]),
            Column("training", [duration(sum(each.seconds.values())) for each in networks]),
        ]
    )
    return f"""{table}

Both networks were trained for {sum(stages)} epochs.
{percent(compressed.removed_before_search)} of the parameters were removed by sparse training alone, \
{percent(compressed.removed_param_fraction)} after the threshold search (target {percent(compressed.target)});
accuracy {percent(compressed.before_compression_top1)} before compression, {percent(compressed.compressed_top1)} \
right after, {percent(compressed.finetuned.last_top1)} finetuned.

{path / "model.safetensors"}  the compressed network
{exported.path}  the same for {exported.runtime}, off by {exported.agreement.max_relative_error:.0e} of the largest \
output
{path / "summary.txt"}  the summary of its run
{dense_path}  the dense run

What to try next:
  strucspars summary {path}  # layer by layer
  strucspars bench {path}  # its speed here; a network this small gets no faster
  strucspars run demo sparsify.target=0.7 --out runs/demo-70  # remove more
  strucspars run cifar10-resnet20-40 data.root=~/cifar10  # a row of the paper"""
