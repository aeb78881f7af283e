"""What the commands print and write, recorded."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from golden_record import VARIES, Record, fingerprint, fingerprint_of_groups, shapes
from golden_subject import ss

from strucspars.core.hierarchy import num_groups

NETWORK = "golden_networks:small"
SHAPE = ("--image-shape", "3x16x16")
NAMED = ("--model", NETWORK)
RUNS = ("structured", "masked", "dense", "taught", "slimming", "as-they-are")
# Rows of a table of the paper that are trained in a second.
QUICK = (
    *("data.name=digits", "data.batch_size=256", f"model.name={NETWORK}", "stage1.epochs=1", "stage2.epochs=1"),
    *("engine.device=cpu", "sparsify.lambda_step=null", "finetune.form=masked"),
)


def files_below(folder: Path) -> list[str]:
    """All but the files of locks, with the clock out of the names."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"tfevents\..*", f"tfevents.{VARIES}", name) for name in names if not name.endswith(".lock"))


def number_or_text(cell: str) -> Any:
    """A cell of a table, as what it was."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def tables_below(folder: Path) -> dict[str, Any]:
    """The cells of all tables."""
    found = {}
    for path in sorted(folder.rglob("*.csv")):
        with path.open(newline="") as file:
            rows = [[number_or_text(cell) for cell in row] for row in csv.reader(file)]
        found[path.relative_to(folder).as_posix()] = rows
    return found


def described_plan(text: str) -> dict[str, Any]:
    """A plan with fingerprints of its connections."""
    document: dict[str, Any] = json.loads(text)
    for layer in document["layers"].values():
        groups = num_groups(layer["group_level"])
        layer["connections"] = fingerprint_of_groups(groups, layer.pop("out_perm"), layer.pop("in_perm"))
    return document


@pytest.mark.parametrize("name", RUNS)
def test_a_run_prints_the_recorded_document(workplace: Any, golden: Record, name: str) -> None:
    golden.check(f"run-{name}", workplace.run(name))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_writes_the_recorded_rows_of_metrics(workplace: Any, golden: Record, name: str) -> None:
    lines = (workplace.run_folder(name) / "metrics.jsonl").read_text().splitlines()
    golden.check(f"metrics-{name}", [json.loads(line) for line in lines])


def test_run_folders_hold_the_recorded_files(workplace: Any, golden: Record) -> None:
    found = {name: files_below(workplace.run_folder(name)) for name in RUNS}
    # Another test may have written a report already.
    own = {name: [each for each in files if not each.startswith("report/")] for name, files in found.items()}
    golden.check("run-files", own)


def test_the_summary_in_a_folder_is_the_one_that_is_printed(workplace: Any) -> None:
    for name in RUNS:
        written = json.loads((workplace.run_folder(name) / "summary.json").read_text())
        assert written == workplace.run(name)["runs"][0]["summary"]


def test_a_finished_run_prints_the_same_document_again(workplace: Any) -> None:
    document = workplace.run("structured")
    again = ("run", "golden.yaml", "finetune.form=grouped", "--out", "runs/structured", "--quiet")
    assert workplace.document(*again) == document


def test_seeds_have_the_recorded_folders_and_outcomes(workplace: Any, golden: Record) -> None:
    arguments = ("run", "golden.yaml", "kind=dense", "stage2.epochs=1", "--out", "runs/seeds", "--seeds", "0,1")
    golden.check("run-seeds", workplace.document(*arguments, "--quiet"))


@pytest.mark.parametrize("name", ["structured", "slimming"])
def test_a_resolved_recipe_has_the_recorded_options(workplace: Any, golden: Record, name: str) -> None:
    text = (workplace.run_folder(name) / "recipe.yaml").read_text()
    golden.check(f"recipe-{name}", yaml.safe_load(text))


def test_a_run_decides_on_the_recorded_plan(workplace: Any, golden: Record) -> None:
    plans = {name: (workplace.run_folder(name) / "plan.json").read_text() for name in ("structured", "as-they-are")}
    golden.check("run-plans", {name: described_plan(text) for name, text in plans.items()})


def test_all_forms_of_finetuning_have_the_same_plan(workplace: Any) -> None:
    plans = {(workplace.run_folder(name) / "plan.json").read_text() for name in ("structured", "masked", "taught")}
    assert len(plans) == 1


def test_slimming_keeps_the_recorded_channels(workplace: Any, golden: Record) -> None:
    document = json.loads((workplace.run_folder("slimming") / "selection.json").read_text())
    for norm in document["norms"].values():
        norm["kept"] = [len(norm["kept"]), fingerprint(norm["kept"])]
    golden.check("run-selection", document)


def test_a_run_keeps_the_recorded_arrays_of_its_layers(workplace: Any, golden: Record) -> None:
    folder = workplace.run_folder("structured")
    found: dict[str, Any] = {"layers.json": json.loads((folder / "layers.json").read_text())}
    for path in sorted(folder.rglob("*.npz")):
        with np.load(path) as arrays:
            found[path.relative_to(folder).as_posix()] = shapes(arrays)
    with np.load(folder / "dynamics" / "sparsify-0004.npz") as arrays:
        found["last levels"] = arrays["group_level"].tolist()
        found["last costs"] = arrays["cost"].tolist()
        found["last kept norms"] = [float(value) for value in arrays["kept_norm"][:, 1]]
    golden.check("run-arrays", found)


def test_an_environment_has_the_recorded_keys(workplace: Any, golden: Record) -> None:
    environment = json.loads((workplace.run_folder("structured") / "environment.json").read_text())
    golden.check("environment", {"keys": sorted(environment), "versions": sorted(environment["versions"])})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("resnet18", ("resnet18",)),
        ("cifar-resnet8", ("cifar-resnet8", "--classes", "100")),
        ("function", (NETWORK, *SHAPE)),
    ],
)
def test_the_summary_of_a_network_is_the_recorded_one(
    workplace: Any, golden: Record, name: str, arguments: tuple[str, ...]
) -> None:
    document = workplace.document("summary", *arguments)
    if name == "resnet18":  # one line per layer is enough
        rows = document["rows"]
        document["rows"] = [" ".join(str(row[key]) for key in ("name", "weight_shape", "macs", "note")) for row in rows]
    golden.check(f"summary-{name}", document)


def test_the_summary_of_a_network_reads_as_recorded(workplace: Any, golden: Record) -> None:
    heard = workplace.said("summary", NETWORK, "--classes", "10", *SHAPE)
    golden.check("summary-text", {"status": heard.status, "out": heard.out.splitlines(), "err": heard.err.splitlines()})


@pytest.mark.parametrize("name", ["structured", "slimming"])
def test_the_summary_of_a_run_is_the_recorded_one(workplace: Any, golden: Record, name: str) -> None:
    folder = workplace.run_folder(name)
    options = NAMED if name == "structured" else ()
    golden.check(f"summary-run-{name}", workplace.document("summary", f"runs/{folder.name}", *options))


@pytest.mark.parametrize("name", ["structured", "dense", "slimming"])
def test_eval_prints_the_recorded_document(workplace: Any, golden: Record, name: str) -> None:
    workplace.run(name)
    options = () if name == "slimming" else NAMED
    golden.check(f"eval-{name}", workplace.document("eval", f"runs/{name}", *options))


def test_compress_prints_and_plans_as_recorded(workplace: Any, golden: Record) -> None:
    options = ("--classes", "10", *SHAPE, "--out", "small.safetensors", "--run", "runs/compressed")
    document = workplace.document("compress", "trained.pt", *NAMED, "--target", "0.4", *options)
    folder = workplace.folder / "runs" / "compressed"
    plan = described_plan((folder / "plan.json").read_text())
    decisions = json.loads((folder / "decisions.json").read_text())
    found = {
        "document": document,
        "files": files_below(folder),
        "plan": plan,
        "one_shot": sorted(decisions["one_shot"]),
    }
    golden.check("compress", found)


def test_compress_for_macs_with_wide_groups_prints_the_recorded_document(workplace: Any, golden: Record) -> None:
    options = ("--classes", "10", *SHAPE, "--budget", "macs", "--min-channels-per-group", "8", "--exclude", "3")
    document = workplace.document("compress", "trained.pt", *NAMED, "--target", "0.1", *options)
    golden.check("compress-macs", document)


@pytest.mark.parametrize("name", ["structured", "slimming"])
def test_export_prints_the_recorded_document(workplace: Any, golden: Record, name: str) -> None:
    workplace.run(name)
    options = NAMED if name == "structured" else ()
    document = workplace.document("export", f"runs/{name}", "--format", "onnx", "--out", f"{name}.onnx", *options)
    assert document["runtime"].startswith("ONNX Runtime ")
    assert document["nbytes"] == (workplace.folder / f"{name}.onnx").stat().st_size
    golden.check(f"export-{name}", document | {"nbytes": VARIES, "runtime": VARIES})


def test_a_report_writes_the_recorded_files_and_tables(workplace: Any, golden: Record) -> None:
    workplace.run("structured")
    document = workplace.document("report", "runs/structured")
    folder = workplace.folder / "runs" / "structured" / "report"
    found = {"document": document, "files": files_below(folder), "tables": tables_below(folder)}
    golden.check("report", found | {"headings": headings(folder)})


def test_a_report_of_several_runs_writes_the_recorded_files_and_tables(workplace: Any, golden: Record) -> None:
    for name in ("dense", "taught"):
        workplace.run(name)
    document = workplace.document("report", "runs/dense", "runs/taught", "--out", "compared")
    folder = workplace.folder / "compared"
    tables = {name: rows for name, rows in tables_below(folder).items() if not name.startswith("runs/")}
    kept = {key: value for key, value in document.items() if key != "files"}
    found = {"document": kept, "files": files_below(folder), "tables": tables, "headings": headings(folder)}
    golden.check("report-of-several", found)


def headings(folder: Path) -> list[str]:
    """Those of the page, as it has them."""
    text = (folder / "index.html").read_text()
    return [f"{size} {words.strip()}" for size, words in re.findall(r"<(h[1-6])[^>]*>\s*([^<]*)", text)]


@pytest.mark.parametrize("table", ["table1", "table2", "table3", "table5"])
def test_reproduce_lists_the_recorded_rows(workplace: Any, golden: Record, table: str) -> None:
    golden.check(f"reproduce-{table}", workplace.document("reproduce", table, "--list", "--out", "nowhere"))


def test_reproduce_runs_rows_and_compares_them_as_recorded(workplace: Any, golden: Record) -> None:
    arguments = ("reproduce", "table3", "--rows", "cifar10-resnet56-60-random", *QUICK, "--out", "rows", "--quiet")
    collecting = ("reproduce", "table3", "--collect", "--out", "rows")
    found = {
        "run": workplace.document(*arguments),
        "collected": workplace.document(*collecting),
        "folders": sorted(path.name for path in (workplace.folder / "rows").iterdir()),
    }
    golden.check("reproduce-run", found)


def test_bench_times_the_recorded_rows(workplace: Any, golden: Record) -> None:
    options = ("--classes", "3", *SHAPE, "--runtimes", "onnxruntime,pytorch", "--seconds", "0.1", "--rates", "0.4")
    document = workplace.document("bench", NETWORK, *options, "--quiet")
    assert max(row["difference"] for row in document["rows"]) < 1e-4
    for row in document["rows"]:
        row["difference"] = VARIES
        # Of another version of the exporter, files have other sizes.
        row["nbytes"] = row["nbytes"] and VARIES
    golden.check("bench", document)


def test_mistakes_are_answered_as_recorded(workplace: Any, golden: Record) -> None:
    workplace.run("dense")
    mistakes = {
        "a misspelt key": ("run", "golden.yaml", "stage1.epoch=3"),
        "a wrong type": ("run", "golden.yaml", "stage1.epochs=many"),
        "an unknown network": ("summary", "resnet-50"),
        "an unknown recipe": ("run", "cifar10-resnet56-61"),
        "another recipe in the folder": ("run", "golden.yaml", "kind=dense", "seed=9", "--out", "runs/dense"),
        "code that a folder names": ("summary", "runs/dense"),
        "no folder": ("eval", "runs/nothing"),
        "a network that slimming does not know": ("run", "golden.yaml", "kind=slimming", "--out", "runs/refused"),
        "an unknown target": ("compress", "trained.pt", *NAMED, "--target", "1.5", "--classes", "10", *SHAPE),
    }
    heard = {name: workplace.said(*arguments) for name, arguments in mistakes.items()}
    golden.check("mistakes", {name: [each.status, each.out, each.err] for name, each in heard.items()})


def test_the_version_is_that_of_the_package(workplace: Any) -> None:
    assert workplace.said("--version").out == f"strucspars {ss.__version__}\n"
