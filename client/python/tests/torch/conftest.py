"""Fixtures over torch tensors."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import statecopy.torch
    from daemon_process import Daemon

# Nothing but these tests needs torch.
collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[statecopy.torch.Client]:
    """A client over torch tensors, of a daemon that other tests use too."""
    import statecopy.torch

    with statecopy.torch.connect(shared_daemon.address) as client:
        yield client
