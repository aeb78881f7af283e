"""`strucspars demo`: the whole pipeline on the digits, and whether it keeps its promises."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from strucspars.cli.console import Debug, Json, Output, Overrides, Quiet, Seeds, examples, from_home, parsed_seeds
from strucspars.cli.errors import RunFailed
from strucspars.cli.export import document, exported_runs
from strucspars.cli.report import reported_runs
from strucspars.cli.running import finished_runs, raise_failures, run_all, run_name, seeded_recipes
from strucspars.cost.text_table import Column, text_table
from strucspars.export.checked import ExportReport
from strucspars.train.outcome import RunSummary
from strucspars.train.outcome_text import duration, percent
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import override_keys

LEAST_REMOVED = 0.5
MOST_LOST_ACCURACY = 0.01
# What an accuracy of 449/450 - 1/100 is in binary must not decide.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """The two runs of a demo.

    Attributes:
        dense, compressed: how they ended.
        dense_path, compressed_path: where they lie.
        exported: the compressed network as a file for ONNX Runtime.
        stage_epochs: of the two stages of the compressed one; the dense one was trained for as many in one stage.
    """

    dense: RunSummary
    compressed: RunSummary
    dense_path: Path
    compressed_path: Path
    exported: ExportReport
    stage_epochs: tuple[int, int]

    def text(self) -> str:
        """For people: the comparison, where everything lies, and what to try next."""
        small = self.compressed
        steps = (
            f"Both networks were trained for {sum(self.stage_epochs)} epochs.\n"
            f"{percent(small.removed_before_search)} of the parameters were removed by sparse training alone, "
            f"{percent(small.removed_param_fraction)} after the threshold search (target {percent(small.target)});\n"
            f"accuracy {percent(small.before_compression_top1)} before compression, {percent(small.compressed_top1)} "
            f"right after, {percent(small.finetuned.last_top1)} finetuned."
        )
        places = (
            f"{self.compressed_path / 'model.safetensors'}  the compressed network\n"
            f"{self.exported.path}  the same for {self.exported.runtime}, off by "
            f"{self.exported.agreement.max_relative_error:.0e} of the largest output\n"
            f"{self.compressed_path / 'summary.txt'}  all that its run came to\n"
            f"{self.dense_path}  the dense run"
        )
        following = (
            "What to try next:\n"
            f"  strucspars summary {self.compressed_path}  # layer by layer\n"
            f"  strucspars bench {self.compressed_path}  # its speed here; one as small as this gains none\n"
            "  strucspars run demo sparsify.target=0.7 --out runs/demo-70  # remove more\n"
            "  strucspars run cifar10-resnet20-40 data.root=~/cifar10  # a row of the paper"
        )
        return "\n\n".join((self._table(), steps, places, following))

    def document(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "dense": {"folder": str(self.dense_path), "summary": self.dense.to_json()},
            "compressed": {"folder": str(self.compressed_path), "summary": self.compressed.to_json()},
            "exported": document(self.exported),
            "broken_promises": self.broken_promises(),
        }

    def broken_promises(self) -> list[str]:
        """What was promised and did not come true."""
        small, broken = self.compressed, []
        removed, target = small.removed_before_search, small.target
        if removed is None or target is None or removed < target / 2:
            broken.append(
                f"sparse training alone removed {percent(removed) or 'nothing'}, less than half of the target "
                f"{percent(target)}"
            )
        if small.removed_param_fraction < LEAST_REMOVED - ROUNDING:
            broken.append(
                f"only {percent(small.removed_param_fraction)} of the parameters are removed, less than "
                f"{percent(LEAST_REMOVED)}"
            )
        lost = self.dense.finetuned.last_top1 - small.finetuned.last_top1
        if lost > MOST_LOST_ACCURACY + ROUNDING:
            broken.append(
                f"the compressed network has {percent(small.finetuned.last_top1)}, {100 * lost:.2f} points less than "
                f"the dense one's {percent(self.dense.finetuned.last_top1)}; one point was allowed"
            )
        return broken

    def _table(self) -> str:
        networks = (self.dense, self.compressed)
        return text_table(
            [
                Column(f"digits, seed {self.dense.seed}", ["dense", "compressed"], is_text=True),
                Column("params", [f"{each.params.after:,}" for each in networks]),
                Column("MACs", [f"{each.macs.after:,}" for each in networks]),
                Column("accuracy", [percent(each.finetuned.last_top1) for each in networks]),
                Column("epochs", [str(sum(self.stage_epochs)), "{} + {}".format(*self.stage_epochs)]),
                Column("training", [duration(sum(each.seconds.values())) for each in networks]),
            ]
        )


def demonstrated(
    overrides: Sequence[str], *, out: Path, seeds: Sequence[int] | None, output: Output
) -> list[Demonstration]:
    """Run the demo, or go on with it; one pair of runs per seed.

    Args:
        overrides: of both recipes.
        out: folder of the run folders.
        seeds: None for the recipe's own.
        output: says what happens.

    Raises:
        ValueError: an override names both runs alike.
    """
    for override in overrides:
        if "name" in override_keys(override):
            raise ValueError(f"{override!r}: the two runs of the demo have their own names; leave it out, or use --out")
    small = {out / run_name(recipe): recipe for recipe in seeded_recipes("demo", overrides, seeds)}
    dense = {
        out / run_name(recipe): _trained_as_long(recipe, other)
        for recipe, other in zip(seeded_recipes("demo-dense", overrides, seeds), small.values(), strict=True)
    }
    outcomes = run_all(dense | small, jobs=1, output=output)
    raise_failures(outcomes)
    summaries = finished_runs(outcomes)
    exported = dict(zip(small, exported_runs(small, "onnx"), strict=True))
    return [
        Demonstration(
            dense=summaries[dense_path],
            compressed=summaries[small_path],
            dense_path=dense_path,
            compressed_path=small_path,
            exported=exported[small_path],
            stage_epochs=(recipe.stage1.epochs, recipe.stage2.epochs),
        )
        for dense_path, (small_path, recipe) in zip(dense, small.items(), strict=True)
    ]


def report_of_demo(pairs: Sequence[Demonstration], *, out: Path) -> Path:
    """Write the report of all runs of a demo; returns its page."""
    paths = [path for pair in pairs for path in (pair.compressed_path, pair.dense_path)]
    return reported_runs(paths, out=out).written.page


def _trained_as_long(dense: Recipe, other: Recipe) -> Recipe:
    """The recipe of the dense network with the epochs of both stages of the other, also where those are overridden."""
    return replace(dense, stage2=replace(dense.stage2, epochs=other.stage1.epochs + other.stage2.epochs))


def check_promises(pairs: Sequence[Demonstration]) -> None:
    """Fail if the demo shows less than it promises."""
    broken = [promise for pair in pairs for promise in pair.broken_promises()]
    if broken:
        raise RunFailed(f"the demo does not keep its promises: {'; '.join(broken)}")


EXAMPLES = examples("strucspars demo", "strucspars demo --seeds 0,1,2 --out demo-runs")


def demo(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="The folder to put the run folders in.", callback=from_home)] = Path("runs"),
    seeds: Seeds = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small network on the embedded digits, compress it by half, and compare. Takes minutes on a laptop."""
    from strucspars.cli.demo import check_promises, demonstrated, report_of_demo

    output = Output(as_json=as_json, quiet=quiet)
    pairs = demonstrated(overrides or [], out=out, seeds=None if seeds is None else parsed_seeds(seeds), output=output)
    page = report_of_demo(pairs, out=out / "report")
    text = "\n\n".join((*(pair.text() for pair in pairs), f"{page}  what was learned, to look at in a browser"))
    output.outcome(text, {"demos": [pair.document() for pair in pairs], "report": str(page)})
    check_promises(pairs)
