"""Fixtures: a real daemon, and a client of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from daemon_process import Daemon

if TYPE_CHECKING:
    import statecopy


@pytest.fixture
def start_daemon() -> Iterator[Callable[..., Daemon]]:
    """Starts daemons, each with the command's own arguments, and ends them after the test."""
    started: list[Daemon] = []

    def start(*arguments: str) -> Daemon:
        started.append(Daemon(*arguments))
        return started[-1]

    yield start
    for daemon in started:
        print(f"--- the log of the daemon in {daemon.runtime}\n{daemon.log()}")
    for daemon in started:
        daemon.end()


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon of this test alone: it may be killed and restarted."""
    return start_daemon()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[statecopy.Client]:
    """A client of this test's own daemon."""
    import statecopy

    with statecopy.connect(daemon.address) as client:
        yield client


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Daemon]:
    """One daemon for the tests that leave it as they find it, those of hypothesis above all."""
    daemon = Daemon()
    yield daemon
    daemon.end()
