"""The table for people."""

from collections.abc import Callable
from dataclasses import replace

from strucspars.bench.results import BenchReport, BenchRow, Ratio, report_text
from strucspars.paper.published import PAPER_TIMES

MakeRow = Callable[..., BenchRow]


def lines_of(report: BenchReport) -> list[str]:
    return report_text(report, PAPER_TIMES).splitlines()


def test_a_row_shows_its_numbers_and_its_bound(report: BenchReport) -> None:
    title, header, _, dense, compressed, *_ = lines_of(report)
    assert title == "resnet50, 224 x 224, batch 1, 1 thread"
    assert header.split() == [
        *("runtime", "network", "ms", "quartiles", "fps", "speed-up", "of", "best", "bound", "MACs", "params"),
        *("gathers", "note"),
    ]
    assert dense.split() == ["ONNX", "Runtime", "dense", "80.0", "79.0-81.0", "12.5", "1.00", "1.00", "1.00"]
    assert compressed.split()[2:] == [
        *("65%", "40.0", "39.0-41.0", "25.0", "2.00", "2.00", "2.40", "2.43", "-64.0%", "67")
    ]


def test_the_papers_rows_stand_beside_ours(report: BenchReport) -> None:
    rows = [line.split()[2:] for line in lines_of(report) if line.startswith("the paper ")]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("dense", "80.2", "1.00"),
        ("35%", "68.2", "1.18"),
        ("65%", "61.3", "1.31"),
        ("85%", "53.5", "1.50"),
    ]


def test_the_paper_measured_one_image_of_one_size_on_one_core(report: BenchReport, make_row: MakeRow) -> None:
    for changes in ({"threads": 2}, {"batch": 16}, {"network": "resnet18"}, {"image_shape": (3, 64, 64)}):
        lines = lines_of(replace(report, rows=(make_row(**changes),)))
        assert not [line for line in lines if line.startswith("the paper")]


def test_an_error_has_a_footnote_and_no_time(report: BenchReport) -> None:
    lines = lines_of(report)
    (wrong,) = [line for line in lines if " 85% " in line and line.startswith("ONNX")]
    assert wrong.split()[2:] == ["85%", "2.43", "-64.0%", "67", "[1]"]
    assert "[1] not timed: wrong" in lines


def test_the_notes_say_what_rates_and_bounds_are(report: BenchReport) -> None:
    text = " ".join(report_text(report).split())
    assert "a limit and not a network to use" in text
    assert "network: the removed fraction of the convolutions' weights" in text
    assert "params: of all parameters" in text


def test_gathers_that_are_not_known_are_left_empty(report: BenchReport) -> None:
    unknown = replace(report.rows[3], num_gathers=None, gathered_bytes=None)
    (line,) = [
        line for line in lines_of(replace(report, rows=(unknown,))) if " 85% " in line and line.startswith("ONNX")
    ]
    assert line.split()[2:] == ["85%", "2.43", "[1]"]


def test_a_missing_runtime_is_named_with_its_remedy(report: BenchReport) -> None:
    assert "OpenVINO is not installed and was left out; pip install openvino" in lines_of(report)


def test_command_commit_hardware_and_versions_are_shown(report: BenchReport) -> None:
    assert lines_of(report)[-2:] == [
        "strucspars bench resnet50 (commit 0123456789ab)",
        "cpu some processor, cores 2, torch 2.15",
    ]


def test_of_a_batch_the_images_of_a_call_are_said(report: BenchReport, make_row: MakeRow) -> None:
    rows = (make_row(batch=16, images_per_call=16), make_row(batch=16, images_per_call=1))
    lines = lines_of(replace(report, rows=rows))
    assert lines[1].split()[:3] == ["runtime", "network", "images"]
    assert "16 at once" in lines[3]
    assert "1 by 1" in lines[4]


def test_a_bound_stands_beside_the_network_of_its_runtime_and_way(report: BenchReport, make_row: MakeRow) -> None:
    timing = report.rows[0].timing
    assert timing is not None
    speedups = {("onnxruntime", 16): 1.25, ("onnxruntime", 1): 1.5, ("pytorch", 16): 1.75, ("pytorch", 1): 2.25}
    rows = [
        make_row(
            batch=16,
            rate=0.65,
            form=form,
            runtime=runtime,
            images_per_call=at_once,
            timing=replace(
                timing,
                speedup=Ratio(median=speedup if form == "bound" else 1.0, low=1.0, high=1.0),
                speedup_over_best=Ratio(median=0.75, low=0.75, high=0.75),
            ),
        )
        for (runtime, at_once), speedup in speedups.items()
        for form in ("compressed", "bound")
    ]
    _, header, _, *lines = lines_of(replace(report, rows=tuple(rows)))
    place = header.index("bound")
    best = header.index("of best")
    assert [float(line[place : place + 5]) for line in lines[:4]] == list(speedups.values())
    assert [float(line[best : best + 7]) for line in lines[:4]] == [0.75] * 4


def test_an_error_of_the_bound_is_a_footnote_of_its_network(report: BenchReport) -> None:
    bound = replace(report.rows[2], timing=None, error="not timed: no bound")
    lines = lines_of(replace(report, rows=(*report.rows[:2], bound)))
    (line,) = [line for line in lines if " 65% " in line and line.startswith("ONNX")]
    assert line.split()[-1] == "[1]"
    assert "[1] not timed: no bound" in lines


def test_a_report_without_rows_says_why(report: BenchReport) -> None:
    text = report_text(replace(report, rows=()))
    assert text.startswith("nothing was timed: none of the runtimes is installed\nOpenVINO is not installed")
