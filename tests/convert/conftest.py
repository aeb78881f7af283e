from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
