"""The table for people."""

from collections.abc import Callable
from dataclasses import replace

from strucspars.bench.results import BenchReport, BenchRow, Ratio
from strucspars.bench.text import report_text
from strucspars.paper.published import PAPER_TIMES

MakeRow = Callable[..., BenchRow]


def lines_of(report: BenchReport) -> list[str]:
    return report_text(report, PAPER_TIMES).splitlines()


def test_a_row_shows_its_numbers_and_its_bound(report: BenchReport) -> None:
    title, header, _, dense, compressed, *_ = lines_of(report)
    assert title == "resnet50, 224 x 224, batch 1, 1 thread"
    assert header.split() == [
        *("runtime", "network", "ms", "quartiles", "fps", "speed-up", "of", "best", "bound", "MACs", "eff."),
        *("gathers", "MB", "share", "note"),
    ]
    assert dense.split() == ["ONNX", "Runtime", "dense", "80.0", "79.0-81.0", "12.5", "1.00", "1.00", "1.00", "0.50"]
    assert compressed.split()[2:] == [
        *("65%", "40.0", "39.0-41.0", "25.0", "2.00", "2.00", "2.40", "2.43", "1.00", "67", "67.0", "15%")
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
        assert "the paper" not in report_text(replace(report, rows=(make_row(**changes),)), PAPER_TIMES)


def test_an_error_has_a_footnote_and_no_time(report: BenchReport) -> None:
    lines = lines_of(report)
    (wrong,) = [line for line in lines if " 85% " in line and line.startswith("ONNX")]
    assert wrong.split()[2:] == ["85%", "2.43", "67", "67.0", "[1]"]
    assert "[1] not timed: wrong" in lines


def test_the_bound_is_said_to_be_no_network(report: BenchReport) -> None:
    assert "a limit, not an exact network" in " ".join(report_text(report, PAPER_TIMES).split())


def test_the_legend_explains_the_columns_that_are_there_and_no_others(report: BenchReport) -> None:
    dense = " ".join(report_text(replace(report, rows=report.rows[:1])).split())
    assert "Speed-ups: against the same runtime's" in dense
    assert "MACs: how many times fewer than dense." in dense
    assert not [word for word in ("bound:", "share:", "MB:") if word in dense]
    failed = replace(report.rows[0], network="own", timing=None, error="not timed: wrong")
    text = report_text(replace(report, rows=(failed,)))
    assert not [word for word in ("ms:", "Speed-ups:", "eff.:") if word in text]


def test_a_network_from_which_nothing_is_removed_is_said_to_have_nothing_beside_it(report: BenchReport) -> None:
    alone = replace(report.rows[0], network="runs-dense")
    words = "runs-dense: nothing is removed from this network; it was timed once, as dense"
    assert words in report_text(replace(report, rows=(*report.rows, alone)))
    assert "nothing is removed" not in report_text(report, PAPER_TIMES)


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


def test_of_a_batch_the_fastest_way_is_said(report: BenchReport, make_row: MakeRow) -> None:
    timing = report.rows[0].timing
    assert timing is not None
    rows = (
        make_row(batch=16, images_per_call=16, timing=replace(timing, ms=1600.0)),
        make_row(batch=16, images_per_call=1, timing=replace(timing, ms=1200.0)),
        make_row(batch=16, images_per_call=1, runtime="pytorch", timing=None, error="not timed: wrong"),
    )
    lines = lines_of(replace(report, rows=rows))
    assert "dense: fastest in ONNX Runtime, 1 by 1, 75.0 ms per image" in lines
    assert lines[1].split()[:3] == ["runtime", "network", "images"]
    assert "16 at once" in lines[3]


def test_the_fastest_way_is_that_of_each_rate_and_never_of_a_bound(report: BenchReport, make_row: MakeRow) -> None:
    timing = report.rows[0].timing
    assert timing is not None
    batch = {"batch": 16, "images_per_call": 16}
    rows = (
        make_row(**batch, timing=replace(timing, ms=1600.0)),
        make_row(**batch, rate=0.65, form="compressed", timing=replace(timing, ms=800.0)),
        make_row(**batch, rate=0.65, form="bound", timing=replace(timing, ms=400.0)),
    )
    said = [line for line in lines_of(replace(report, rows=rows)) if "fastest in" in line]
    assert said == [
        "dense: fastest in ONNX Runtime, 16 at once, 100 ms per image",
        "65%: fastest in ONNX Runtime, 16 at once, 50.0 ms per image",
    ]


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


def test_a_rate_that_was_missed_is_said(report: BenchReport) -> None:
    assert "resnet50 85%: 65.7% of the convolutions' weights are removed" in lines_of(report)
    assert not any(line.startswith("resnet50 65%") for line in lines_of(report))


def test_a_rate_that_was_exceeded_is_said(report: BenchReport) -> None:
    less = replace(report, rows=(replace(report.rows[1], rate=0.5),))
    assert "resnet50 50%: 65.7% of the convolutions' weights are removed" in lines_of(less)


def test_a_report_without_rows_says_why(report: BenchReport) -> None:
    text = report_text(replace(report, rows=()))
    assert text.startswith("nothing was timed: none of the runtimes is installed\nOpenVINO is not installed")


def test_the_rates_say_what_they_count_and_what_they_are_of_all_parameters(report: BenchReport) -> None:
    text = " ".join(report_text(report).split())
    dense, compressed = (report.rows[place].size.params for place in (0, 1))
    assert "resnet50: rates count the convolutions' weights; of all parameters, which compress --target counts" in text
    assert f"65% is {1 - compressed / dense:.1%}" in text
