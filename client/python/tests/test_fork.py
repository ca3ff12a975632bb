"""A forked child has no client; the parent's goes on as if nothing had happened."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import pytest

import statecopy
from oracle import Cache, bytes_of, int32, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon_process import Daemon

# In a program of its own: pytest's end is not the child's.
FORK_AND_EXIT = """
import os, sys
import numpy as np
import statecopy

cache = statecopy.empty((4, 2, 3, 5), "float32")
np.asarray(cache)[:] = 7
client = statecopy.connect()
plan = client.register({"layers.0": cache}, max_selected=4)["layers.0"]
held = plan.gather([1])
pending = plan.submit_gather([2])
if (child := os.fork()) == 0:
    # The interpreter's usual end: every object of the parent's is dropped here too.
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert np.asarray(pending.wait()).min() == 7
assert np.asarray(plan.gather([1, 2])).min() == 7
assert np.asarray(held).min() == 7
print("went on")
"""


def in_a_child(work: Callable[[], str]) -> str:
    """What a forked child's work returns."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Forking beside threads is just what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            said = work()
        except BaseException as error:  # whatever it is, the parent tells it
            said = f"unexpected {error!r}"
        os.write(writing, pickle.dumps(said))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    return str(said)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except statecopy.ForkedError as error:
        return str(error)
    return "not refused"


def test_the_childs_copy_is_closed_and_says_so(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    final = cache.packed(1)
    for call in (
        lambda: plan.gather(int32(1)),
        lambda: plan.scatter(final, int32(1)),
        lambda: plan.submit_gather(int32(1)),
        lambda: client.register({"layers.0": cache.states}, max_selected=1),
        lambda: client.rebind({"layers.0": cache.states}),
        lambda: client.ping(),
    ):
        said = in_a_child(lambda call=call: refused(call))
        assert "fork" in said.lower(), said
        assert "connect" in said, "the remedy"
    assert bytes_of(plan.gather(int32(1))) == cache.gathered([1])
    cache.check()


def test_the_parent_goes_on_while_and_after_a_child_drops_everything(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    held = plan.gather(int32(2))
    objects = [held, plan, cache]

    def drop() -> str:
        objects.clear()
        return "dropped"

    expected = bytes_of(held)
    assert in_a_child(drop) == "dropped"
    for row in range(6):
        assert bytes_of(plan.gather(int32(row))) == cache.gathered([row])
    assert bytes_of(held) == expected


def test_closing_in_the_child_closes_nothing_of_the_parent(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)

    def close() -> str:
        client.close()
        return "closed"

    assert in_a_child(close) == "closed"
    assert bytes_of(plan.gather(int32(1))) == cache.gathered([1])


def test_a_child_may_connect_by_itself(client: statecopy.Client, daemon: Daemon) -> None:
    cache = Cache()
    plan = plan_of(client, cache)

    def work() -> str:
        # Memory of the parent's stays shared with it: the child allocates its own.
        own = Cache(seed=5)
        with statecopy.connect(daemon.address) as mine:
            gathered = bytes_of(plan_of(mine, own).gather(int32(3)))
        return "equal" if gathered == own.gathered([3]) else "different"

    assert in_a_child(work) == "equal"
    assert bytes_of(plan.gather(int32(1))) == cache.gathered([1])


def test_a_child_that_ends_as_programs_end_harms_nothing(daemon: Daemon) -> None:
    environment = {**os.environ, "STATECOPY_ADDR": daemon.address}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK_AND_EXIT],
        check=False, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "went on\n"), ran.stderr


def test_two_children_in_turn_are_refused_alike(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    said = {in_a_child(lambda: refused(lambda: plan.gather(int32(1)))) for _ in range(2)}
    assert len(said) == 1, said
    client.close()
    with pytest.raises(statecopy.ClosedError) as caught:
        plan.gather(int32(1))
    assert not isinstance(caught.value, statecopy.ForkedError)
