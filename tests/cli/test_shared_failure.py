"""One process fails, another loses its connection: what each of them tells."""

import re
import socket
from datetime import timedelta

import pytest
from torch import distributed

from strucspars.cli.errors import FAILED, WRONG_USE, OtherProcessFailed
from strucspars.cli.shared_failure import failures_shared

BROKEN = RuntimeError("Connection closed by peer")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> object:
    """The store of processes that torchrun has started; it lives while the test holds it."""
    # Torch does not list it among what the module has.
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    return server


def fail(rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    with failures_shared():
        raise error


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("error", "words", "status"),
    [
        (ValueError("no image"), "process 1: no image", WRONG_USE),
        (OSError(28, "No space left"), "process 1: [Errno 28] No space left", FAILED),
        (KeyError("bug"), "process 1: KeyError: 'bug'", FAILED),
    ],
)
def test_a_process_that_loses_its_connection_tells_why(
    error: Exception, words: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error)):
        fail(1, error, monkeypatch)
    with pytest.raises(OtherProcessFailed, match=f"^{re.escape(words)}$") as heard:
        fail(0, BROKEN, monkeypatch)
    assert heard.value.exit_status == status


@pytest.mark.usefixtures("store")
def test_a_process_keeps_an_error_that_has_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        with pytest.raises(ValueError, match=f"of {rank}"):
            fail(rank, ValueError(f"of {rank}"), monkeypatch)


@pytest.mark.usefixtures("store")
def test_an_error_that_no_other_process_explains_keeps_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="Connection closed"):
        fail(0, BROKEN, monkeypatch)


@pytest.mark.usefixtures("store")
def test_failures_before_torchrun_started_its_processes_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no image"):
        fail(1, ValueError("no image"), monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RuntimeError, match="Connection closed"):
        fail(0, BROKEN, monkeypatch)


def test_one_process_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RuntimeError, match="Connection closed"):
        fail(0, BROKEN, monkeypatch)


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.usefixtures("store")
def test_where_torchrun_has_not_set_everything_errors_stay_what_they_are(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match="no image"), failures_shared():
        raise ValueError("no image")


@pytest.mark.parametrize("error", [BROKEN, ValueError("Connection closed")], ids=["unexpected", "explained"])
def test_where_the_store_is_gone_an_error_stays_what_it_is(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("strucspars.cli.shared_failure.STORE_TIMEOUT", timedelta(milliseconds=100))
    with pytest.raises(type(error), match="Connection closed"):
        fail(0, error, monkeypatch)
