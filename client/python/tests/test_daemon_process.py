"""The fixtures themselves: what other tests rely on."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from daemon_process import Daemon, binary, runs


def test_a_daemon_is_ready_and_ends_with_nothing_left(daemon: Daemon) -> None:
    assert daemon.ready()
    device_process = daemon.device_process
    daemon.stop()
    assert not daemon.running
    assert not runs(device_process)
    assert not list(daemon.runtime.iterdir())


def test_a_killed_daemon_takes_its_device_process_along_and_the_next_one_serves(daemon: Daemon) -> None:
    first, device_process, address = daemon.pid, daemon.device_process, daemon.address
    daemon.kill()
    assert not runs(first)
    assert not runs(device_process)
    daemon.restart()
    assert daemon.ready()
    assert daemon.pid != first
    assert daemon.address == address


def test_two_daemons_do_not_meet(start_daemon: Callable[..., Daemon]) -> None:
    first, second = start_daemon(), start_daemon()
    first.kill()
    assert second.ready()


def test_a_missing_binary_is_named_with_what_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATECOPYD", raising=False)
    with pytest.raises(AssertionError, match="cargo build -p statecopyd"):
        binary()
    monkeypatch.setenv("STATECOPYD", os.path.join(os.sep, "nowhere", "statecopyd"))
    with pytest.raises(AssertionError, match="is no program"):
        binary()
