"""What of a run is shown."""

from dataclasses import replace

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run

from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.report.contents import run_contents
from strucspars.report.reading import RunData, read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """Without anything that takes long to draw."""
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes={"conv": (8, 8, 1, 1)}, recipe=small_recipe()))
    return replace(read_run(path), rows=(), dynamics=())


def test_a_confusion_matrix_that_is_wide_on_one_side_has_no_table(run: RunData) -> None:
    def tables(level: int) -> list[str]:
        order = np.arange(32)
        plan = GroupingPlan(
            {
                f"b.conv{place}": LayerPlan(
                    group_level=each, out_perm=order, in_perm=order, weight_shape=(32, 32, 1, 1)
                )
                for place, each in enumerate((2, level))
            }
        )
        shapes = {name: layer.weight_shape for name, layer in plan.layers.items()}
        contents = run_contents(replace(run, plan=plan, weight_shapes=shapes, importance={}))
        (figure,) = (figure for figure in contents.figures if figure.name == "confusion")
        return [table.name for table in figure.tables]

    assert tables(5) == ["confusion-1"]
    assert tables(6) == []
