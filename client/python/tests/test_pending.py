"""Copies that are submitted and waited for later, or awaited."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import statecopy
from daemon_process import eventually, in_threads, stop
from oracle import Cache, Layout, bytes_of, caches_in_one_memory, int32, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon_process import Daemon


@pytest.fixture
def stopped(daemon: Daemon) -> Iterator[Callable[[], None]]:
    """Stops the device process: whatever is asked of it waits. The returned function lets it go on."""
    pid = daemon.device_process
    stop(pid)
    going = threading.Event()

    def go_on() -> None:
        if not going.is_set():
            going.set()
            os.kill(pid, signal.SIGCONT)

    yield go_on
    go_on()


def ready_plan(client: statecopy.Client, cache: Cache) -> statecopy.Plan:
    """With memory for results in the pool already: a stopped device process maps none."""
    plan = plan_of(client, cache)
    held = [plan.gather(int32(4)) for _ in range(3)]
    del held
    return plan


def test_a_submitted_gather_is_waited_for_later(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    indices, flags = int32(3, 0, -1), np.array([True, False, True])
    pending = plan.submit_gather(indices, flags)
    assert bytes_of(pending.wait()) == cache.gathered(indices, flags)


def test_indices_may_change_as_soon_as_submit_returns(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    indices = int32(3, 0, 5)
    expected = cache.gathered(indices)
    pending = plan.submit_gather(indices)
    indices[:] = -1
    assert bytes_of(pending.wait()) == expected


def test_several_in_flight_keep_their_order_in_one_lane(client: statecopy.Client) -> None:
    cache = Cache(Layout(shape=(40, 2, 3, 5)))
    plan = plan_of(client, cache)
    # A pending scatter that is dropped is given up: it may run, or not.
    scatters, waiting = [], []
    # Two requests a step: fewer than the ring has places.
    for step in range(20):
        final = cache.packed(2, seed=step)
        scatters.append(plan.submit_scatter(final, int32(step, (step + 1) % 40), lane=3))
        cache.scatter(final, int32(step, (step + 1) % 40))
        expected = cache.gathered([step, (step + 1) % 40, step - 1])
        waiting.append((plan.submit_gather(int32(step, (step + 1) % 40, step - 1), lane=3), expected))
    for pending, expected in reversed(waiting):
        assert bytes_of(pending.wait()) == expected
    for pending in scatters:
        pending.wait()
    cache.check()


def test_awaiting_gives_the_packed_states(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)

    async def both() -> None:
        gathered = [plan.submit_gather(int32(row)) for row in range(6)]
        for row, pending in enumerate(gathered):
            assert bytes_of(await pending) == cache.gathered([row])
        final = cache.packed(2)
        await plan.submit_scatter(final, int32(2, 4))
        cache.scatter(final, int32(2, 4))

    asyncio.run(both())
    cache.check()


def test_sets_are_submitted_too(client: statecopy.Client) -> None:
    caches = caches_in_one_memory(Layout(shape=(6, 2, 3, 4), gap=8), 3)
    tensors = {str(at): cache.states for at, cache in enumerate(caches)}
    kda = client.register(tensors, max_selected=4, sets={"kda": list(tensors)}).sets["kda"]
    packed = kda.submit_gather_all(int32(1, 5)).wait()
    assert bytes_of(packed) == b"".join(cache.gathered([1, 5]) for cache in caches)
    kda.submit_scatter_all(packed, int32(0, 2)).wait()
    for at, cache in enumerate(caches):
        cache.scatter(np.asarray(packed)[at], int32(0, 2))
    caches[0].check()


def test_the_event_loop_runs_while_a_copy_is_awaited(
    client: statecopy.Client, daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    cache = Cache()
    plan = ready_plan(client, cache)
    go_on: Callable[[], None] = request.getfixturevalue("stopped")

    async def meet() -> bytes:
        pending = plan.submit_gather(int32(4))
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while ticks < 20:
                await asyncio.sleep(0.001)
                ticks += 1
            go_on()

        ticking = asyncio.ensure_future(tick())
        packed = await pending
        await ticking
        return bytes_of(packed)

    assert asyncio.run(meet()) == cache.gathered([4])


@pytest.mark.parametrize("call", ["gather", "scatter", "wait"])
def test_other_threads_run_while_a_copy_is_waited_for(
    client: statecopy.Client, daemon: Daemon, request: pytest.FixtureRequest, call: str
) -> None:
    cache = Cache()
    plan = ready_plan(client, cache)
    final = np.asarray(plan.gather(int32(4))).copy()
    calls = {
        "gather": lambda: plan.gather(int32(4)),
        "scatter": lambda: plan.scatter(final, int32(4)),
        "wait": lambda: plan.submit_gather(int32(4)).wait(),
    }
    go_on: Callable[[], None] = request.getfixturevalue("stopped")
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        calls[call]()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    # Were the interpreter's lock held, this thread would not come this far before the copy is done, which it cannot be.
    turns = sum(1 for _ in range(100_000))
    assert turns == 100_000
    assert not done.is_set()
    go_on()
    thread.join(timeout=20)
    assert done.is_set()


def test_a_copy_that_has_not_started_by_its_deadline_never_will(
    client: statecopy.Client, daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    cache = Cache()
    plan = ready_plan(client, cache)
    # In the pool, so that nothing has to be shared while the device process stands still.
    final = plan.gather(int32(-1))
    go_on: Callable[[], None] = request.getfixturevalue("stopped")
    late = plan.submit_scatter(final, int32(2), timeout_s=0.001)
    passed = time.monotonic() + 0.01
    eventually("the deadline has passed", lambda: time.monotonic() > passed)
    go_on()
    with pytest.raises(statecopy.DeadlineExceeded) as caught:
        late.wait()
    assert (caught.value.code, caught.value.leaves) == ("DEADLINE_EXCEEDED", "nothing_moved")
    assert not isinstance(caught.value, ValueError)
    assert bytes_of(plan.gather(int32(2))) == cache.gathered([2])
    cache.check()


def test_a_daemon_that_does_not_answer_is_waited_for_until_shortly_after_the_deadline(
    daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    cache = Cache()
    with statecopy.connect(daemon.address, timeout_s=2) as client:
        plan = ready_plan(client, cache)
        go_on: Callable[[], None] = request.getfixturevalue("stopped")
        begin = time.monotonic()
        with pytest.raises(statecopy.Error) as caught:
            plan.gather(int32(4))
        # The daemon is given 5 s to say itself that it is too late.
        assert 2 <= time.monotonic() - begin < 20
        assert isinstance(caught.value, statecopy.Unavailable | statecopy.DeadlineExceeded)
        assert caught.value.leaves == "unknown"
        go_on()
        assert bytes_of(plan.gather(int32(4))) == cache.gathered([4])


def test_a_pending_copy_that_nobody_waits_for_is_let_go(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    for _ in range(200):
        plan.submit_gather(int32(1, 2, 3))
        plan.gather(int32(1))
    gc.collect()
    # In one lane: when this one is done, so are those before it.
    assert bytes_of(plan.gather(int32(3))) == cache.gathered([3])
    eventually("all buffers are back in the pool", lambda: client.counters()["pool_bytes_in_use"] == 0)


def test_threads_copy_at_once_each_in_a_lane_of_its_own(client: statecopy.Client) -> None:
    cache = Cache(Layout(shape=(64, 2, 3, 5)))
    plan = plan_of(client, cache)
    wrong: list[str] = []

    def work(first: int) -> None:
        rng = np.random.default_rng(first)
        for _ in range(100):
            indices = rng.integers(-1, 65, 8)
            if bytes_of(plan.gather(indices)) != cache.gathered(indices):
                wrong.append(f"thread {first}: {indices}")

    in_threads(8, work)
    assert not wrong
