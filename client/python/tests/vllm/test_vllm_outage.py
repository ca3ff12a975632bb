"""The daemon is killed under a worker, and started again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from workers import KimiLayer, caches, pages

import statecopy
from daemon_process import Daemon
from statecopy.vllm import StateCopy, initialize_state_copy

ROWS, TRUE = torch.tensor([3]), torch.tensor([True])
ADDED = torch.ones(1, 2, 8, 8)


class Victim:
    """A worker of two layers."""

    def __init__(self, daemon: Daemon, **options: Any) -> None:
        self.layers = [KimiLayer() for _ in range(2)]
        self.bind()
        named = {f"model.layers.{at}": layer for at, layer in enumerate(self.layers)}
        self.handle: StateCopy = initialize_state_copy(named, 4, address=daemon.address, **options)

    def bind(self) -> None:
        memory = pages(4, layers=2)
        for at, layer in enumerate(self.layers):
            layer.kv_cache = caches(memory, at)

    def step(self) -> float:
        """One prefill of row 3 in both layers: the value of the initial state."""
        initial = [layer.forward(ADDED, ROWS, TRUE) for layer in self.layers]
        assert torch.equal(initial[0], initial[1])
        return float(initial[0].max())


@pytest.fixture
def victim(daemon: Daemon) -> Iterator[Victim]:
    made = Victim(daemon, reconnect_s=0.2)
    yield made
    made.handle.close()


def test_a_killed_daemon_is_an_error_and_the_next_one_serves_the_worker(daemon: Daemon, victim: Victim) -> None:
    assert [victim.step(), victim.step()] == [0, 1]
    daemon.kill()
    with pytest.raises(statecopy.Unavailable):
        victim.step()
    assert victim.handle.ready
    daemon.restart()
    assert [victim.step(), victim.step()] == [2, 3]


def test_a_worker_may_sleep_while_the_daemon_is_away(daemon: Daemon, victim: Victim) -> None:
    victim.step()
    daemon.kill()
    victim.handle.release()
    assert not victim.handle.ready
    daemon.restart()
    victim.bind()
    victim.handle.rebind()
    assert [victim.step(), victim.step()] == [0, 1]


def test_a_worker_may_start_anew_while_the_daemon_is_away(daemon: Daemon, victim: Victim) -> None:
    daemon.kill()
    named = {f"model.layers.{at}": layer for at, layer in enumerate(victim.layers)}
    with pytest.raises(statecopy.Unavailable):
        initialize_state_copy(named, 4, address=daemon.address, wait_s=0.0)
    assert not any(layer._kda_state_copy_ready for layer in victim.layers)
    daemon.restart()
    with initialize_state_copy(named, 4, address=daemon.address) as handle:
        assert handle.ready
        assert victim.step() == 0


def test_a_worker_goes_on_without_a_daemon_where_that_was_chosen(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    victim = Victim(daemon, on_unavailable="local")
    with victim.handle as handle, caplog.at_level(logging.WARNING):
        assert victim.step() == 0
        daemon.kill()
        assert [victim.step(), victim.step()] == [1, 2]
        assert handle.client is not None
        counters = handle.client.counters()
        assert counters["outages"] == 1
        assert counters["local_scatters"] == 4
    assert any("away" in record.message for record in caplog.records)
