"""The life of a client: connecting, releasing and rebinding, closing; the daemon's death under it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import statecopy
from daemon_process import eventually, in_threads, stop
from oracle import Cache, Layout, bytes_of, int32, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from daemon_process import Daemon


def test_the_address_may_come_from_the_environment(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATECOPY_ADDR", daemon.address)
    with statecopy.connect() as client:
        client.ping()


@pytest.mark.parametrize("form", ["uri", "socket", "directory"])
def test_the_address_is_a_uri_a_socket_or_a_runtime_directory(daemon: Daemon, form: str) -> None:
    socket = daemon.address.removeprefix("unix://")
    address = {"uri": daemon.address, "socket": socket, "directory": os.path.dirname(socket)}[form]
    with statecopy.connect(address) as client:
        client.ping()


def test_connecting_waits_for_a_daemon_that_still_starts(daemon: Daemon) -> None:
    daemon.kill()
    connected: list[statecopy.Client] = []
    thread = threading.Thread(target=lambda: connected.append(statecopy.connect(daemon.address, wait_s=20)))
    thread.start()
    daemon.restart()
    thread.join(timeout=20)
    assert len(connected) == 1
    connected[0].close()


def test_without_a_daemon_connecting_ends_within_its_wait(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(statecopy.Unavailable) as caught:
        statecopy.connect(f"unix://{tmp_path}/nobody.sock", wait_s=0.2)
    assert time.monotonic() - begin < 5
    assert "nobody.sock" in str(caught.value)
    assert caught.value.leaves == "nothing_moved"


@pytest.mark.parametrize("address", ["", "http://127.0.0.1:1", "unix://" + "x" * 200])
def test_an_address_that_is_none_is_an_argument_error(address: str) -> None:
    with pytest.raises(statecopy.ArgumentError):
        statecopy.connect(address, wait_s=0.1)


def test_a_closed_client_and_its_plans_refuse(daemon: Daemon) -> None:
    cache = Cache()
    client = statecopy.connect(daemon.address)
    plan = plan_of(client, cache)
    final = cache.packed(1)
    client.close()
    client.close()
    calls: list[Callable[[], object]] = [
        lambda: plan.gather(int32(1)),
        lambda: plan.scatter(final, int32(1)),
        lambda: plan.submit_gather(int32(1)),
        lambda: client.register({"layers.0": cache.states}, max_selected=1),
        lambda: client.rebind({"layers.0": cache.states}),
        client.ping,
    ]
    for call in calls:
        with pytest.raises(statecopy.ClosedError):
            call()
    cache.check()


def test_leaving_the_with_statement_closes_also_after_an_error(daemon: Daemon) -> None:
    cache = Cache()
    client = statecopy.connect(daemon.address)
    plan = plan_of(client, cache)
    with pytest.raises(KeyError), client:
        raise KeyError
    with pytest.raises(statecopy.ClosedError):
        plan.gather(int32(1))


def test_closing_gives_everything_back_to_the_daemon(daemon: Daemon) -> None:
    cache = Cache()
    with statecopy.connect(daemon.address) as client:
        plan_of(client, cache).gather(int32(1))
        assert daemon.metric("statecopy_sessions") == 1
        assert daemon.metric("statecopy_layers") == 1
    for gauge in ("statecopy_sessions", "statecopy_layers", "statecopy_regions"):
        eventually(f"{gauge} is 0 again", lambda gauge=gauge: daemon.metric(gauge) == 0)


def test_a_daemon_that_ends_waits_for_no_closed_client_whose_plans_live_on(daemon: Daemon) -> None:
    cache = Cache()
    client = statecopy.connect(daemon.address)
    plan = plan_of(client, cache)
    held = plan.gather(int32(1))
    client.close()
    daemon.stop()
    assert "clients kept their connections" not in daemon.log()
    assert bytes_of(held) == cache.gathered([1])


def test_two_clients_in_one_process_live_fail_and_close_independently(start_daemon: Callable[..., Daemon]) -> None:
    first_daemon, second_daemon = start_daemon(), start_daemon()
    first_cache, second_cache = Cache(seed=1), Cache(seed=2)
    first = statecopy.connect(first_daemon.address, timeout_s=1)
    second = statecopy.connect(second_daemon.address)
    plan_a, plan_b = plan_of(first, first_cache), plan_of(second, second_cache)
    assert bytes_of(plan_a.gather(int32(2))) == first_cache.gathered([2])
    assert bytes_of(plan_b.gather(int32(2))) == second_cache.gathered([2])

    first_daemon.kill()
    with pytest.raises(statecopy.Error):
        plan_a.gather(int32(2))
    assert bytes_of(plan_b.gather(int32(3))) == second_cache.gathered([3])

    first.close()
    assert bytes_of(plan_b.gather(int32(4))) == second_cache.gathered([4])
    second.close()


def test_two_clients_of_one_daemon_may_share_one_cache(daemon: Daemon) -> None:
    cache = Cache()
    with statecopy.connect(daemon.address) as first, statecopy.connect(daemon.address) as second:
        plan_a, plan_b = plan_of(first, cache), plan_of(second, cache)
        final = cache.packed(2)
        plan_a.scatter(final, int32(1, 4))
        cache.scatter(final, int32(1, 4))
        assert bytes_of(plan_b.gather(int32(4, 1))) == cache.gathered([4, 1])
        first.close()
        assert bytes_of(plan_b.gather(int32(4, 1))) == cache.gathered([4, 1])


def test_rebinding_moves_a_layer_to_other_memory_of_the_same_layout(client: statecopy.Client) -> None:
    old, new = Cache(seed=1), Cache(seed=2)
    plan = plan_of(client, old)
    assert bytes_of(plan.gather(int32(3))) == old.gathered([3])
    client.rebind({"layers.0": new.states})
    assert bytes_of(plan.gather(int32(3))) == new.gathered([3])
    final = new.packed(1)
    plan.scatter(final, int32(0))
    new.scatter(final, int32(0))
    new.check()
    old.check()


@pytest.mark.parametrize(
    "other", [Layout(shape=(7, 2, 3, 5)), Layout(dtype="int32"), Layout(gap=8), Layout(shape=(6, 2, 5, 3))]
)
def test_rebinding_to_another_layout_is_refused_and_the_old_one_stays(client: statecopy.Client, other: Layout) -> None:
    cache, wrong = Cache(), Cache(other)
    plan = plan_of(client, cache)
    with pytest.raises(statecopy.Error) as caught:
        client.rebind({"layers.0": wrong.states})
    assert caught.value.code == "SIGNATURE_MISMATCH"
    assert "layers.0" in str(caught.value)
    assert bytes_of(plan.gather(int32(3))) == cache.gathered([3])


def test_rebinding_an_unknown_layer_names_it(client: statecopy.Client) -> None:
    cache = Cache()
    plan_of(client, cache)
    with pytest.raises(statecopy.ArgumentError, match=r"layers\.9"):
        client.rebind({"layers.9": cache.states})


def test_released_layers_sleep_until_they_are_bound_again(client: statecopy.Client) -> None:
    cache, woken = Cache(seed=1), Cache(seed=2)
    plan = plan_of(client, cache)
    client.release()
    with pytest.raises(statecopy.Error) as caught:
        plan.gather(int32(1))
    assert caught.value.leaves == "nothing_moved"
    client.rebind({"layers.0": woken.states})
    assert bytes_of(plan.gather(int32(1))) == woken.gathered([1])


def test_a_new_registration_makes_the_old_plans_stale(client: statecopy.Client) -> None:
    cache = Cache()
    old = plan_of(client, cache)
    new = plan_of(client, cache)
    with pytest.raises(statecopy.PlanError) as caught:
        old.gather(int32(1))
    assert caught.value.code == "STALE_PLAN"
    assert bytes_of(new.gather(int32(1))) == cache.gathered([1])


def test_a_restarted_daemon_gets_everything_anew_from_the_client(client: statecopy.Client, daemon: Daemon) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    for _ in range(2):
        daemon.restart()
        assert bytes_of(plan.gather(int32(5, 1))) == cache.gathered([5, 1])
        final = cache.packed(2)
        plan.scatter(final, int32(3, 0))
        cache.scatter(final, int32(3, 0))
        cache.check()


def test_a_killed_device_process_is_started_again_and_the_plan_goes_on(
    client: statecopy.Client, daemon: Daemon
) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    before = daemon.device_process
    os.kill(before, signal.SIGKILL)
    eventually("another device process", lambda: daemon.device_process_or_none() not in (None, before))
    assert bytes_of(plan.gather(int32(5, 1))) == cache.gathered([5, 1])


def test_a_daemon_killed_under_a_waiting_copy_ends_it_within_its_deadline(
    client: statecopy.Client, daemon: Daemon
) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    # Memory for the result is in the pool from here on.
    plan.gather(int32(2))
    stop(daemon.device_process)
    pending = plan.submit_gather(int32(2), timeout_s=5)
    daemon.kill()
    begin = time.monotonic()
    with pytest.raises(statecopy.Error) as caught:
        pending.wait()
    assert time.monotonic() - begin < 20
    assert isinstance(caught.value, statecopy.Unavailable | statecopy.DeadlineExceeded)
    daemon.restart()
    assert bytes_of(plan.gather(int32(2))) == cache.gathered([2])


def test_freezing_copies_what_is_not_known_and_still_serves(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    client.freeze()
    out = np.asarray(statecopy.empty((2, 2, 3, 5), "float32"))
    before = client.counters()["regions_registered"]
    assert bytes_of(plan.gather(int32(1, 5), out=out)) == cache.gathered([1, 5])
    final = np.asarray(statecopy.empty((2, 2, 3, 5), "float32"))
    final[:] = 3
    plan.scatter(final, int32(1, 5))
    cache.scatter(final, int32(1, 5))
    cache.check()
    assert client.counters()["regions_registered"] == before


def test_trimming_gives_pooled_buffers_back(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    held = plan.gather(int32(1))
    for _ in range(3):
        plan.gather(int32(1, 2, 3))
    expected = bytes_of(held)
    assert client.counters()["pool_bytes"] > 0
    assert client.trim() > 0
    counters = client.counters()
    assert counters["pool_bytes"] == counters["pool_bytes_in_use"] > 0
    assert bytes_of(held) == expected
    del held
    client.trim()
    assert client.counters()["pool_bytes"] == 0
    assert bytes_of(plan.gather(int32(1, 2))) == cache.gathered([1, 2])


@pytest.mark.parametrize("transport", ["ring", "grpc"])
def test_both_transports_copy(daemon: Daemon, transport: str) -> None:
    cache = Cache()
    with statecopy.connect(daemon.address, transport=transport) as client:
        plan = plan_of(client, cache)
        assert bytes_of(plan.gather(int32(5, -1))) == cache.gathered([5, -1])


def test_registration_tells_how_far_it_is(client: statecopy.Client) -> None:
    cache = Cache()
    told: list[tuple[str, int, int]] = []
    client.register({"layers.0": cache.states}, max_selected=4, progress=lambda *now: told.append(now))
    assert told
    assert all(0 <= done <= total == 1 for _, done, total in told)


def test_threads_that_register_with_one_client_take_turns(client: statecopy.Client) -> None:
    raised: list[BaseException] = []

    def register(number: int) -> None:
        try:
            for turn in range(40):
                cache = statecopy.empty((4, 1, 2, 4), "int32")
                np.asarray(cache)[:] = 1000 * number + turn
                plan = client.register({f"layers.{number}": cache}, max_selected=2)[f"layers.{number}"]
                # Stale once another thread's turn has come.
                try:
                    packed = np.asarray(plan.gather(int32(3)))
                except statecopy.PlanError:
                    continue
                assert (packed == 1000 * number + turn).all()
        except BaseException as error:
            raised.append(error)

    in_threads(4, register)
    assert not raised


def test_what_a_registration_calls_may_not_register_in_its_turn(client: statecopy.Client) -> None:
    cache, tells = Cache(), []

    def progress(*_told: object) -> None:
        with pytest.raises(statecopy.ArgumentError, match="while it runs in the same thread"):
            client.release()
        for call in (client.ping, client.inspect):
            with pytest.raises(statecopy.ArgumentError, match="within another one"):
                call()
        tells.append(True)

    plan = client.register({"layers.0": cache.states}, max_selected=2, progress=progress)["layers.0"]
    assert tells
    assert bytes_of(plan.gather(int32(1))) == bytes_of(cache.states[1:2])
    client.release()
