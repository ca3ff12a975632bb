"""What the tests of the glue share: a daemon that the environment names, and workers beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import statecopy.vllm
from daemon_process import Daemon


@pytest.fixture
def addressed(shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """STATECOPY_ADDR names a daemon."""
    monkeypatch.setenv("STATECOPY_ADDR", shared_daemon.address)
    return shared_daemon


@pytest.fixture
def initialise(addressed: Daemon) -> Iterator[Callable[..., statecopy.vllm.StateCopy]]:
    """`initialize_state_copy` for at most 4 rows, closed after the test."""
    made: list[statecopy.vllm.StateCopy] = []

    def call(layers: dict[str, Any], **options: Any) -> statecopy.vllm.StateCopy:
        handle = statecopy.vllm.initialize_state_copy(layers, options.pop("max_num_seqs", 4), **options)
        made.append(handle)
        return handle

    yield call
    for handle in made:
        handle.close()
