"""Going on while the daemon is away, where that was chosen."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import statecopy
import statecopy.torch
from daemon_process import eventually
from statecopy.torch import fallback, local_copy
from statecopy.torch.fallback import Fallback
from torch_oracle import (
    DTYPES,
    FLAG_DTYPES,
    INDEX_DTYPES,
    Cache,
    int32,
    int64,
    plan_of,
    random_states,
    same_bits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon_process import Daemon


@pytest.fixture
def local(daemon: Daemon) -> Iterator[statecopy.torch.Client]:
    """A client that copies in this process while its daemon is away."""
    with statecopy.torch.connect(daemon.address, on_unavailable="local") as client:
        yield client


class TestLocalCopies:
    """The copy itself keeps the contract."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
    def test_every_dtype_moves_bit_for_bit_both_ways(self, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
        cache = Cache(dtype=dtype)
        limits = torch.iinfo(index_dtype)
        indices = torch.tensor([3, -1, 0, 6, 5, 3, limits.min, limits.max], dtype=index_dtype)
        for flag_dtype in FLAG_DTYPES:
            flags = torch.tensor([[1, 1, 1, 1], [0, 1 << (8 * flag_dtype.itemsize - 2), 1, 1]]).to(flag_dtype)
            packed = local_copy.gather([cache.state], indices, flags, 8)
            assert same_bits(packed[0], cache.gathered(indices, flags))
        final, distinct = cache.packed(5), torch.tensor([5, 6, -1, 2, limits.min], dtype=index_dtype)
        local_copy.scatter([cache.state], final[None], distinct, 8)
        cache.scatter(final, distinct)
        cache.check()

    @pytest.mark.parametrize("selected", [0, 1, 5])
    def test_every_count_and_none_valid(self, selected: int) -> None:
        cache = Cache()
        for indices in (torch.arange(selected), torch.full((selected,), -1)):
            assert same_bits(local_copy.gather([cache.state], indices, None, 8)[0], cache.gathered(indices))
            local_copy.scatter([cache.state], cache.packed(selected)[None], indices, 8)
            cache.scatter(cache.packed(selected), indices)
            cache.check()

    @pytest.mark.parametrize("values", [[4, -1, 0, 9], [-1, 5, 9, 2], [-1, -1, 9, 9], [1, 2, 3, 4], [7], [3]], ids=str)
    def test_the_way_of_a_device_reads_no_value_on_the_host(
        self, values: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caches = [Cache(seed=1), Cache(seed=2)]
        indices, final = (
            torch.tensor(values, dtype=torch.int32),
            random_states((2, len(values), 2, 3, 5), torch.float32),
        )
        for cache, packed in zip(caches, final, strict=True):
            cache.scatter(packed, indices)
        for name in ("item", "tolist", "__bool__", "__index__", "nonzero"):
            monkeypatch.setattr(torch.Tensor, name, _must_not_be_read)
        local_copy._scatter_blindly([cache.state for cache in caches], final, indices)
        monkeypatch.undo()
        for cache in caches:
            cache.check()

    def test_what_does_not_fit_is_refused_as_the_daemon_does(self) -> None:
        states = [Cache().state]
        packed = torch.empty(1, 2, 2, 3, 5)
        refused: dict[str, Callable[[], object]] = {
            "INDEX_TYPE": lambda: local_copy.gather(states, torch.empty(2), None, 8),
            "SELECTED_TOO_LARGE": lambda: local_copy.gather(states, int32(1, 2, 3), None, 2),
            "FLAGS_MISMATCH": lambda: local_copy.gather(states, int32(1, 2), torch.tensor([1]), 8),
            "PACKED_MISMATCH": lambda: local_copy.scatter(states, packed, int32(1), 8),
            "ROW_INVALID": lambda: local_copy.check_unique(states[0], int32(1, -1, 1, -1)),
        }
        for code, act in refused.items():
            with pytest.raises(statecopy.ArgumentError) as caught:
                act()
            assert caught.value.code == code


WRONG_LISTS = {
    "INDEX_TYPE": [([1.9], None), ([True, False], None), (["1"], None), ([1 << 63], None)],
    "FLAGS_MISMATCH": [([1, 2], [1.5, 0]), ([1, 2], ["a", "b"])],
}


def test_lists_that_the_daemon_refuses_are_refused_by_a_local_copy_too(local: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(local, cache)
    for code, lists in WRONG_LISTS.items():
        for indices, flags in lists:
            with pytest.raises(statecopy.ArgumentError) as served:
                plan.gather(indices, flags)
            with pytest.raises(statecopy.ArgumentError) as alone:
                local_copy.operands(cache.state, indices, flags)
            assert served.value.code == alone.value.code == code, (indices, flags)
    indices, flags = local_copy.operands(cache.state, [], [])
    assert (indices.dtype, len(indices)) == (torch.int64, 0)
    assert flags is not None
    assert len(flags) == 0
    with pytest.raises(statecopy.ArgumentError) as caught:
        local_copy.foreign(cache.packed(1).double().numpy(), cache.state.dtype)
    assert caught.value.code == "PACKED_MISMATCH"


def _must_not_be_read(*_arguments: Any, **_options: Any) -> Any:
    raise AssertionError("a value was read on the host")


def test_a_killed_daemon_is_done_without_and_its_successor_is_found(
    daemon: Daemon,
    local: statecopy.torch.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fallback, "ASK_EVERY_S", 0.05)
    cache = Cache()
    plan = plan_of(local, cache)
    indices, flags = int32(1, -1, 5, 2), torch.tensor([1, 1, 0, 1])
    assert same_bits(plan.gather(indices, flags), cache.gathered(indices, flags))
    assert local.counters()["outages"] == 0

    daemon.kill()
    with caplog.at_level(logging.INFO, logger="statecopy.torch"):
        started = time.monotonic()
        assert same_bits(plan.gather(indices, flags), cache.gathered(indices, flags))
        plan.scatter(final := cache.packed(4), indices)
        cache.scatter(final, indices)
        for _ in range(20):
            assert same_bits(plan.gather(indices), cache.gathered(indices))
        assert time.monotonic() - started < 5, "it waited for the daemon"
        cache.check()
    counters = local.counters()
    assert (counters["local_gathers"], counters["local_scatters"], counters["outages"]) == (21, 1, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "loud, and once an outage"

    daemon.restart()
    caplog.clear()
    gathers = local.counters()["gathers"]

    def served() -> bool:
        assert same_bits(plan.gather(indices), cache.gathered(indices))
        return local.counters()["gathers"] > gathers

    with caplog.at_level(logging.INFO, logger="statecopy.torch"):
        eventually("the next daemon serves", served)
    assert "is back" in caplog.text
    assert local.counters()["outages"] == 1
    plan.scatter(final := cache.packed(4, seed=3), indices)
    cache.scatter(final, indices)
    cache.check()


def test_an_outage_is_met_by_sets_tensors_of_the_caller_and_debug(daemon: Daemon) -> None:
    with statecopy.torch.connect(daemon.address, on_unavailable="local", debug=True) as client:
        caches = [Cache((6, 2, 4, 4), seed=seed) for seed in range(2)]
        plans = client.register({"a": caches[0].state, "b": caches[1].state}, max_selected=4, sets={"kda": ["a", "b"]})
        kda, plan = plans.sets["kda"], plans["a"]
        daemon.kill()
        indices = int64(4, -1, 0)
        expected = torch.stack([cache.gathered(indices) for cache in caches])
        assert same_bits(kda.gather_all(indices), expected)
        assert same_bits(plan.gather([4, -1, 0], [True, True, True]), expected[0]), "lists serve as well"
        out = torch.empty(3, 2, 4, 4)
        assert plan.gather(indices, out=out) is out
        assert same_bits(out, expected[0])
        final = random_states((2, 3, 2, 4, 4), torch.float32)
        kda.scatter_all(final, indices)
        for cache, packed in zip(caches, final, strict=True):
            cache.scatter(packed, indices)
            cache.check()
        with pytest.raises(statecopy.ArgumentError) as caught:
            plan.scatter(final[0], int32(1, 2, 1))
        assert caught.value.code == "ROW_INVALID"
        caches[0].check()


def test_a_compiled_model_goes_on_as_well(daemon: Daemon, local: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(local, cache)
    torch._dynamo.reset()
    traced = torch.compile(lambda indices: plan.gather(indices), backend="eager", fullgraph=True)
    with statecopy.torch.forward_context({"layers.0": plan}):
        assert same_bits(traced(int32(1, 2)), cache.gathered(int32(1, 2)))
        daemon.kill()
        assert same_bits(traced(int32(3, 2)), cache.gathered(int32(3, 2)))
    assert local.counters()["local_gathers"] == 1


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_threads_go_on_through_an_outage_and_back(
    daemon: Daemon, local: statecopy.torch.Client, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(fallback, "ASK_EVERY_S", 0.02)
    caches = [Cache(seed=seed) for seed in range(3)]
    plans = local.register({str(at): cache.state for at, cache in enumerate(caches)}, max_selected=8)
    stop, raised = threading.Event(), []

    def work(at: int) -> None:
        cache, plan, step = caches[at], plans[str(at)], 0
        try:
            while not stop.is_set():
                step += 1
                indices = torch.randperm(7, dtype=torch.int32)[:4]
                plan.scatter(final := cache.packed(4, seed=step), indices)
                cache.scatter(final, indices)
                assert same_bits(plan.gather(indices), cache.gathered(indices))
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    try:
        for outages in (1, 2):
            served = local.counters()["gathers"]
            eventually("it serves", lambda served=served: raised or local.counters()["gathers"] > served + 20)  # type: ignore[misc]
            daemon.kill() if way == "kill" else daemon.stop()
            count = local.counters()["local_gathers"]
            eventually("they go on", lambda count=count: raised or local.counters()["local_gathers"] > count + 20)  # type: ignore[misc]
            assert local.counters()["outages"] == outages
            daemon.restart()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert raised == []
    for cache in caches:
        cache.check()


def test_over_grpc_an_outage_is_met_as_well(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "ASK_EVERY_S", 0.05)
    with statecopy.torch.connect(daemon.address, on_unavailable="local", transport="grpc") as client:
        cache = Cache()
        plan = plan_of(client, cache)
        assert same_bits(plan.gather(int32(1)), cache.gathered(int32(1)))
        daemon.kill()
        assert same_bits(plan.gather(int32(2)), cache.gathered(int32(2)))
        assert client.counters()["local_gathers"] == 1
        daemon.restart()

        def served() -> bool:
            assert same_bits(plan.gather(int32(3)), cache.gathered(int32(3)))
            return client.counters()["gathers"] > 1

        eventually("the next daemon serves", served)


def test_a_refusal_is_never_fallen_back_from(daemon: Daemon, local: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(local, cache)
    plan_of(local, cache)
    with pytest.raises(statecopy.PlanError):
        plan.gather(int32(1))
    with pytest.raises(statecopy.ArgumentError):
        plan.gather(torch.tensor([1.0]))
    counters = local.counters()
    assert (counters["outages"], counters["local_gathers"]) == (0, 0)


def test_a_drained_daemon_is_waited_out(daemon: Daemon, local: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(local, cache)
    plan.gather(int32(1))
    daemon.stop()
    assert same_bits(plan.gather(int32(2)), cache.gathered(int32(2)))
    assert local.counters()["outages"] == 1


def test_what_is_released_or_closed_is_not_copied_locally(daemon: Daemon, local: statecopy.torch.Client) -> None:
    plan = plan_of(local, Cache())
    local.release()
    with pytest.raises(statecopy.Error):
        plan.gather(int32(1))
    daemon.kill()
    with pytest.raises(statecopy.Error):
        plan.gather(int32(1))
    local.close()
    with pytest.raises(statecopy.ClosedError):
        plan.gather(int32(1))


def test_without_a_fallback_an_absent_daemon_is_an_error(daemon: Daemon) -> None:
    with statecopy.torch.connect(daemon.address, timeout_s=0.2) as client:
        plan = plan_of(client, Cache())
        daemon.kill()
        with pytest.raises(statecopy.Unavailable):
            plan.gather(int32(1))
        assert client.counters()["local_gathers"] == 0


def test_a_daemon_that_is_not_there_cannot_be_connected_to(tmp_path: Any) -> None:
    with pytest.raises(statecopy.Unavailable):
        statecopy.torch.connect(tmp_path, on_unavailable="local", wait_s=0.05)


class _Core:
    """A client whose copies are astray for a while."""

    closed = False
    lost: statecopy.Unavailable | None = None

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def has_stray_copies(self) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def _check_stream(self) -> None:
        if self.lost is not None:
            raise self.lost


class TestWhenToFallBack:
    @staticmethod
    def absent(code: str = "UNAVAILABLE") -> Any:
        def ask() -> Any:
            raise statecopy.Unavailable("gone", code=code, leaves="unknown")

        return ask

    def test_not_before_every_copy_is_accounted_for(self) -> None:
        core = _Core(looks=5)
        made = Fallback(core, timeout_s=10.0)  # type: ignore[arg-type]
        assert made.run("local_gathers", self.absent(), lambda: core.looks) < 0
        assert made.counters() == {"local_gathers": 1, "local_scatters": 0, "outages": 1}

    def test_never_while_a_copy_may_still_run(self) -> None:
        made = Fallback(_Core(looks=10**9), timeout_s=0.05)  # type: ignore[arg-type]
        with pytest.raises(statecopy.Unavailable):
            made.run("local_gathers", self.absent(), lambda: pytest.fail("it was copied here"))
        assert made.counters()["outages"] == 0

    @pytest.mark.parametrize("about", ["stream", "graph"])
    def test_not_in_the_place_of_a_copy_that_a_stream_lost(self, about: str) -> None:
        core = _Core(looks=0)
        made = Fallback(core, timeout_s=10.0)  # type: ignore[arg-type]
        lost = statecopy.Unavailable("gone", code="UNAVAILABLE", leaves="unknown", about=about)

        def ask() -> Any:
            raise lost

        with pytest.raises(statecopy.Unavailable) as raised:
            made.run("local_gathers", ask, lambda: pytest.fail("it was copied here"))
        assert raised.value is lost
        # Also once another stream's call has found that the daemon is away.
        assert made.run("local_gathers", self.absent(), lambda: 1) == 1
        core.lost = lost
        with pytest.raises(statecopy.Unavailable) as raised:
            made.run("local_gathers", ask, lambda: pytest.fail("it was copied here"))
        assert raised.value is lost
        assert made.counters() == {"local_gathers": 1, "local_scatters": 0, "outages": 1}

    def test_not_for_a_daemon_that_goes_on_draining(self) -> None:
        made = Fallback(_Core(looks=0), timeout_s=0.05)  # type: ignore[arg-type]
        with pytest.raises(statecopy.Unavailable) as caught:
            made.run("local_gathers", self.absent("DRAINING"), lambda: pytest.fail("it was copied here"))
        assert caught.value.code == "DRAINING"

    def test_while_one_call_asks_for_an_absent_daemon_the_others_do_not_wait(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        made = Fallback(_Core(looks=0), timeout_s=1.0)  # type: ignore[arg-type]
        made.run("local_gathers", self.absent(), lambda: None)
        now[0] += 2 * fallback.ASK_EVERY_S

        def ask() -> str:
            # Another thread's call, meanwhile.
            return made.run("local_gathers", lambda: pytest.fail("it asked as well"), lambda: "local")

        assert made.run("local_gathers", ask, lambda: "not this one's") == "local"

    def test_a_daemon_that_drained_is_away_once_it_is_unavailable(self) -> None:
        made = Fallback(_Core(looks=0), timeout_s=10.0)  # type: ignore[arg-type]
        said = iter(["DRAINING", "DRAINING", "UNAVAILABLE"])

        def ask() -> Any:
            raise statecopy.Unavailable("gone", code=next(said))

        assert made.run("local_scatters", ask, lambda: "local") == "local"
        assert made.counters()["outages"] == 1

    def test_an_answer_from_before_an_outage_does_not_end_it(self) -> None:
        made = Fallback(_Core(looks=0), timeout_s=10.0)  # type: ignore[arg-type]

        def ask() -> str:
            # Meanwhile another thread finds the daemon gone.
            made.run("local_gathers", self.absent(), lambda: None)
            return "late"

        assert made.run("local_gathers", ask, lambda: "local") == "late"
        assert made.run("local_gathers", self.absent(), lambda: "local") == "local"
        assert made.counters()["outages"] == 1

    def test_an_absent_daemon_is_asked_for_once_in_a_while(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        made = Fallback(_Core(looks=0), timeout_s=1.0)  # type: ignore[arg-type]
        asked = []

        def ask() -> Any:
            asked.append(now[0])
            raise statecopy.Unavailable("gone", code="UNAVAILABLE")

        for _ in range(50):
            made.run("local_gathers", ask, lambda: None)
            now[0] += 0.1
        assert len(asked) == 5
        assert made.run("local_gathers", lambda: "served", lambda: "local") in ("served", "local")


def test_a_plan_that_the_daemon_refuses_is_not_copied_for_while_it_is_away(
    daemon: Daemon, local: statecopy.torch.Client
) -> None:
    one, two = Cache(seed=1), Cache(seed=2)
    old = local.register({"a": one.state}, max_selected=4)["a"]
    new = local.register({"b": two.state}, max_selected=4)["b"]
    with pytest.raises(statecopy.PlanError):
        old.gather(int32(1))
    daemon.kill()
    assert same_bits(new.gather(int32(1)), two.gathered(int32(1)))
    for copy in (lambda: old.gather(int32(1)), lambda: old.scatter(one.packed(1), int32(1))):
        with pytest.raises(statecopy.PlanError) as caught:
            copy()
        assert caught.value.code == "STALE_PLAN"
    one.check()


def test_a_refused_registration_ends_its_predecessor_also_for_local_copies(
    daemon: Daemon, local: statecopy.torch.Client
) -> None:
    cache = Cache()
    old = local.register({"a": cache.state}, max_selected=4)["a"]
    with pytest.raises(statecopy.ArgumentError):
        local.register({"b": Cache().state}, max_selected=0)
    daemon.kill()
    with pytest.raises(statecopy.PlanError):
        old.gather(int32(1))


def test_a_registration_that_nobody_answers_ends_nothing(daemon: Daemon) -> None:
    cache = Cache()
    with statecopy.torch.connect(daemon.address, on_unavailable="local", timeout_s=2, register_timeout_s=1) as client:
        plan = client.register({"a": cache.state}, max_selected=4)["a"]
        daemon.kill()
        with pytest.raises(statecopy.Error):
            client.register({"b": Cache().state}, max_selected=4)
        assert same_bits(plan.gather(int32(1)), cache.gathered(int32(1)))
        daemon.restart()
        before = client.counters()["gathers"]

        def is_served() -> bool:
            assert same_bits(plan.gather(int32(1)), cache.gathered(int32(1)))
            return client.counters()["gathers"] > before

        eventually("the daemon serves the old plan again", is_served)


def test_a_registration_that_is_answered_ends_the_outage(daemon: Daemon, local: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(local, cache)
    daemon.kill()
    plan.gather(int32(1))
    assert local.counters()["local_gathers"] == 1
    daemon.restart()
    plan = plan_of(local, cache)
    plan.gather(int32(1))
    assert local.counters()["local_gathers"] == 1


def test_packed_in_the_cache_is_refused_in_an_outage_too(daemon: Daemon, local: statecopy.torch.Client) -> None:
    # Rows begin where packed may: nothing of them has to be copied first.
    state = statecopy.torch.empty((6, 2, 4, 4), torch.float32, (48, 16, 4, 1))
    state.copy_(torch.arange(6 * 32).view(6, 2, 4, 4))
    before = state.clone()
    plan = local.register({"layer": state}, max_selected=4)["layer"]
    calls = (
        lambda: plan.scatter(state[1:2], int32(3)),
        lambda: plan.gather(int32(3), out=state[1:2]),
    )
    for away in (False, True):
        if away:
            daemon.kill()
        for call in calls:
            with pytest.raises(statecopy.ArgumentError) as caught:
                call()
            assert caught.value.code == "OVERLAP", (away, caught.value)
    assert same_bits(state.contiguous(), before.contiguous())


def test_packed_of_another_library_is_taken_in_an_outage_too(daemon: Daemon, local: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(local, cache)
    final = cache.packed(2)
    daemon.kill()
    plan.scatter(final.numpy(), int32(1, 2))  # type: ignore[arg-type]
    cache.scatter(final, int32(1, 2))
    cache.check()
    with pytest.raises(statecopy.ArgumentError):
        plan.scatter("final", int32(1, 2))  # type: ignore[arg-type]
