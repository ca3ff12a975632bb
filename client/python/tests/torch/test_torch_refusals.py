"""Bad input: an exception before anything moves, naming argument, value and limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import statecopy
import statecopy.torch
from torch_oracle import Cache, int32, plan_of, same_bits, shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon_process import Daemon

    Act = Callable[[statecopy.torch.Plan, Cache], Any]


GATHERS: dict[str, tuple[Act, str, str]] = {
    "float indices": (lambda plan, _: plan.gather(torch.tensor([1.0])), "INDEX_TYPE", "float32"),
    "indices of 16 bits": (lambda plan, _: plan.gather(torch.tensor([1], dtype=torch.int16)), "INDEX_TYPE", "int16"),
    "indices of two axes": (lambda plan, _: plan.gather(torch.tensor([[1]])), "INDEX_TYPE", "axis"),
    "too many rows": (lambda plan, _: plan.gather(torch.zeros(17, dtype=torch.int32)), "SELECTED_TOO_LARGE", "17.*16"),
    "flags of another length": (
        lambda plan, _: plan.gather(int32(1, 2), torch.tensor([True])),
        "FLAGS_MISMATCH",
        "1 flags.* 2 ",
    ),
    "float flags": (lambda plan, _: plan.gather(int32(1), torch.tensor([1.0])), "FLAGS_MISMATCH", "float32"),
    "out of another shape": (
        lambda plan, _: plan.gather(int32(1), out=torch.empty(2, 2, 3, 5)),
        "PACKED_MISMATCH",
        "2, 2, 3, 5",
    ),
    "out of another dtype": (
        lambda plan, _: plan.gather(int32(1), out=torch.empty(1, 2, 3, 5).double()),
        "PACKED_MISMATCH",
        "float64",
    ),
    "out over the cache": (
        lambda plan, cache: plan.gather(int32(1), out=cache.memory[:120].view(torch.float32).view(1, 2, 3, 5)),
        "OVERLAP",
        "overlap",
    ),
    "packed of another shape": (
        lambda plan, _: plan.scatter(torch.empty(2, 2, 3, 5), int32(1)),
        "PACKED_MISMATCH",
        "2, 2, 3, 5",
    ),
}


@pytest.mark.parametrize("name", GATHERS)
def test_a_copy_that_does_not_fit_is_refused_and_moves_nothing(client: statecopy.torch.Client, name: str) -> None:
    act, code, words = GATHERS[name]
    cache = Cache()
    plan = plan_of(client, cache)
    with pytest.raises(statecopy.ArgumentError, match=words) as caught:
        act(plan, cache)
    assert caught.value.code == code
    assert isinstance(caught.value, ValueError)
    assert caught.value.remedy
    cache.check()
    assert same_bits(plan.gather(int32(1)), cache.gathered(int32(1), None))


def test_a_tensor_of_another_device_is_refused(client: statecopy.torch.Client) -> None:
    plan = plan_of(client, Cache())
    with pytest.raises(statecopy.ArgumentError, match="the plan's layers are on"):
        plan.gather(torch.empty(2, dtype=torch.int32, device="meta"))
    with pytest.raises(statecopy.ArgumentError, match="the plan's layers are on"):
        plan.scatter(torch.empty(1, 2, 3, 5, device="meta"), int32(1))


def test_a_state_that_is_not_dense_is_refused_and_nothing_is_published(client: statecopy.torch.Client) -> None:
    good = Cache()
    bad = statecopy.torch.empty((4, 2, 6, 5), torch.float32)[:, :, ::2]
    with pytest.raises(statecopy.ArgumentError, match="bad") as caught:
        client.register({"good": good.state, "bad": bad}, max_selected=4)
    assert caught.value.code == "LAYOUT_INVALID"


def test_a_state_of_ordinary_memory_is_refused_with_the_remedy(client: statecopy.torch.Client) -> None:
    with pytest.raises(statecopy.Error, match=r"statecopy\.torch\.empty"):
        client.register({"layers.0": torch.empty(4, 2, 3, 5)}, max_selected=4)


def test_what_is_no_tensor_is_refused_by_name(client: statecopy.torch.Client) -> None:
    with pytest.raises(statecopy.ArgumentError, match=r"layers\.0 is a list"):
        client.register({"layers.0": [1, 2]}, max_selected=4)  # type: ignore[dict-item]


def test_states_of_two_devices_are_refused(client: statecopy.torch.Client) -> None:
    states = {"a": Cache().state, "b": torch.empty(4, 2, 3, 5, device="meta")}
    with pytest.raises(statecopy.ArgumentError, match="a on cpu, b on meta"):
        client.register(states, max_selected=4)


def test_a_plan_of_an_earlier_registration_is_stale(client: statecopy.torch.Client) -> None:
    cache = Cache()
    old = plan_of(client, cache)
    plan_of(client, cache)
    with pytest.raises(statecopy.PlanError) as caught:
        old.gather(int32(1))
    assert caught.value.code == "STALE_PLAN"


def test_a_gather_that_the_daemon_refuses_leaves_no_tensor_and_keeps_no_buffer(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    packed = plan.gather(int32(1))
    del packed
    buffers = client.counters()["pool_buffers"]
    plan_of(client, cache)
    for _ in range(3):
        with pytest.raises(statecopy.PlanError, match="STALE_PLAN"):
            plan.gather(int32(1))
    counters = client.counters()
    assert (counters["pool_bytes_in_use"], counters["pool_buffers"]) == (0, buffers)
    assert counters["gathers"] == 1


def test_a_closed_client_refuses(shared_daemon: Daemon) -> None:
    client = statecopy.torch.connect(shared_daemon.address)
    plan = plan_of(client, Cache())
    client.close()
    assert client.closed
    with pytest.raises(statecopy.ClosedError):
        plan.gather(int32(1))
    client.close()


def test_debug_refuses_destinations_that_repeat(shared_daemon: Daemon) -> None:
    with statecopy.torch.connect(shared_daemon.address, debug=True) as client:
        cache = Cache()
        plan = plan_of(client, cache)
        with pytest.raises(statecopy.ArgumentError) as caught:
            plan.scatter(cache.packed(3), int32(1, 2, 1))
        assert caught.value.code == "ROW_INVALID"
        plan.scatter(final := cache.packed(3), int32(1, -1, -1))
        cache.scatter(final, int32(1, -1, -1))
        cache.check()


@pytest.mark.parametrize(
    ("device", "words"),
    [("meta", "meta, whose UUID"), ("cuda:7", "CUDA devices"), (3, "CUDA devices"), ("xpu:0", "xpu:0, whose UUID")],
)
def test_a_device_that_cannot_be_named_is_refused_before_the_daemon_is_asked(device: str | int, words: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("the messages are those of a machine without CUDA")
    with pytest.raises(statecopy.ArgumentError, match=words):
        statecopy.torch.connect("unix:///nowhere", device=device)


def test_a_uuid_of_a_device_that_is_not_served_is_refused(shared_daemon: Daemon) -> None:
    with pytest.raises(statecopy.HandleError) as caught:
        statecopy.torch.connect(shared_daemon.address, device="GPU-01234567-89ab-cdef-0123-456789abcdef")
    assert caught.value.code == "DEVICE_NOT_VISIBLE"


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")], ids=str)
def test_the_host_needs_no_name(shared_daemon: Daemon, device: torch.device | str | None) -> None:
    with statecopy.torch.connect(shared_daemon.address, device=device) as client:
        client.ping()


def test_an_unknown_way_out_is_refused() -> None:
    with pytest.raises(statecopy.ArgumentError, match="'maybe'"):
        statecopy.torch.connect("unix:///nowhere", on_unavailable="maybe")  # type: ignore[arg-type]


def test_an_unknown_completion_is_refused(shared_daemon: Daemon) -> None:
    with pytest.raises(statecopy.ArgumentError, match=r"soon.*stream.*host") as raised:
        statecopy.torch.connect(shared_daemon.address, completion="soon")  # type: ignore[arg-type]
    assert raised.value.about == "completion"


def test_copies_of_the_host_are_complete_when_their_calls_return(shared_daemon: Daemon) -> None:
    cache = Cache()
    with statecopy.torch.connect(shared_daemon.address, completion="stream") as client:
        info = client.info()
        assert info is not None
        assert info["completion"] == "host"
        plan = plan_of(client, cache)
        # Lanes are theirs to name, and there is nothing to check.
        assert same_bits(plan.gather(int32(1), lane=7), cache.gathered(int32(1), None))
        client.check()
        client.reset_lanes()
    with pytest.raises(statecopy.ClosedError):
        client.check()


def test_a_layer_moves_to_other_memory_and_sleeps_and_wakes(client: statecopy.torch.Client) -> None:
    cache, other = Cache(), Cache(seed=2)
    plan = plan_of(client, cache)
    client.rebind({"layers.0": other.state})
    assert plan.state is other.state
    assert same_bits(plan.gather(int32(1)), other.gathered(int32(1)))
    with pytest.raises(statecopy.PlanError):
        client.rebind({"layers.0": Cache((5, 2, 3, 5)).state})
    assert plan.state is other.state

    client.release()
    with pytest.raises(statecopy.HandleError):
        plan.gather(int32(1))
    client.rebind({"layers.0": cache.state})
    assert same_bits(plan.gather(int32(1)), cache.gathered(int32(1), None))


def test_empty_gives_the_layout_and_type_that_was_asked_for() -> None:
    state = statecopy.torch.empty((4, 2, 3, 5), torch.float8_e5m2, (64, 15, 5, 1))
    assert (tuple(state.shape), state.stride(), state.dtype) == ((4, 2, 3, 5), (64, 15, 5, 1), torch.float8_e5m2)
    assert not state.view(torch.uint8).any()
    assert statecopy.torch.empty((3,), "int32").dtype is torch.int32
    with pytest.raises(statecopy.ArgumentError, match="complex128"):
        statecopy.torch.empty((3,), torch.complex128)
    with pytest.raises(statecopy.ArgumentError, match="'int31'"):
        statecopy.torch.empty((3,), "int31")


def test_shared_memory_dies_with_its_last_view(client: statecopy.torch.Client) -> None:
    plan = plan_of(client, Cache())
    indices = shared(int32(1, 2, 3, 4, 5))
    view = indices[4:]
    del indices
    assert view.tolist() == [5]
    assert plan.route(view).how == "in_place"
