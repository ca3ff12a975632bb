"""Release before sleep, rebind after wake."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from workers import KimiLayer, caches, pages

import statecopy
import statecopy.vllm
from daemon_process import Daemon, eventually

Initialise = Callable[..., statecopy.vllm.StateCopy]
ROWS, TRUE = torch.tensor([3]), torch.tensor([True])


def worker(initialise: Initialise, **options: Any) -> tuple[list[KimiLayer], statecopy.vllm.StateCopy]:
    layers = [KimiLayer() for _ in range(2)]
    bind(layers)
    return layers, initialise({f"model.layers.{at}": layer for at, layer in enumerate(layers)}, **options)


def bind(layers: list[KimiLayer], rows: int = 4) -> torch.Tensor:
    memory = pages(rows, len(layers))
    for at, layer in enumerate(layers):
        layer.kv_cache = caches(memory, at)
    return memory


def mapped(daemon: Daemon) -> set[str]:
    """What of a worker's memory the daemon's device process has mapped: caches, and buffers for packed states."""
    with open(f"/proc/{daemon.device_process}/maps", encoding="utf-8") as maps:
        found = re.findall(r"/memfd:(\S+)", maps.read())
    return {"statecopy.empty", "statecopy.pool"}.intersection(found)


def test_a_released_worker_refuses_and_says_how_to_go_on(initialise: Initialise) -> None:
    layers, handle = worker(initialise)
    copies = [layer._ascend_kda_state_copy for layer in layers]
    states = [layer.kv_cache[1] for layer in layers]
    handle.release()
    assert not handle.ready
    assert not any(layer._kda_state_copy_ready for layer in layers)
    with pytest.raises(RuntimeError, match="not initialised"):
        layers[0].forward(torch.zeros(1, 2, 8, 8), ROWS, TRUE)
    for copy, state in zip(copies, states, strict=True):
        with pytest.raises(statecopy.PlanError, match="released for sleep") as caught:
            copy.gather(state, ROWS, TRUE)
        assert "rebind()" in caught.value.remedy
        with pytest.raises(statecopy.PlanError, match="released for sleep"):
            copy.scatter(state, torch.zeros(1, 2, 8, 8), ROWS)
    handle.release()
    assert not handle.ready


def test_released_memory_is_really_freed(initialise: Initialise, daemon: Daemon) -> None:
    layers, handle = worker(initialise, address=daemon.address)
    layers[0].forward(torch.ones(1, 2, 8, 8), ROWS, TRUE)
    assert mapped(daemon) == {"statecopy.empty", "statecopy.pool"}
    freed = weakref.ref(layers[0].kv_cache[1].untyped_storage())
    handle.release()
    for layer in layers:
        layer.kv_cache = ()
    gc.collect()
    assert freed() is None, "the client holds the cache"
    eventually("the daemon unmaps all of it", lambda: not mapped(daemon))


def test_a_rebound_worker_goes_on_with_new_memory(initialise: Initialise) -> None:
    layers, handle = worker(initialise)
    copies = [layer._ascend_kda_state_copy for layer in layers]
    old = layers[0].kv_cache[1]
    handle.release()
    bind(layers)
    handle.rebind()
    assert handle.ready
    assert [layer._ascend_kda_state_copy for layer in layers] == copies
    for value, layer in enumerate(layers, start=1):
        layer.forward(torch.full((1, 2, 8, 8), float(value)), ROWS, TRUE)
    for value, layer in enumerate(layers, start=1):
        assert layer.kv_cache[1][3].eq(value).all()
    assert not old.any()
    with pytest.raises(statecopy.ArgumentError, match="base of state"):
        copies[0].gather(old, ROWS, TRUE)


def test_caches_that_keep_their_address_over_sleep_wake_too(initialise: Initialise) -> None:
    # As vLLM's sleep-mode allocator does it: the tensors stay, and the memory under them comes back.
    layers, handle = worker(initialise)
    handle.release()
    for layer in layers:
        layer.kv_cache[1].zero_()
    handle.rebind()
    for layer in layers:
        layer.forward(torch.ones(1, 2, 8, 8), ROWS, TRUE)
        assert layer.kv_cache[1][3].eq(1).all()


def test_caches_may_be_bound_anew_without_a_release(initialise: Initialise) -> None:
    layers, handle = worker(initialise)
    bind(layers)
    handle.rebind()
    layers[1].forward(torch.ones(1, 2, 8, 8), ROWS, TRUE)
    assert layers[1].kv_cache[1][3].eq(1).all()


@pytest.mark.parametrize("slept", [True, False], ids=["asleep", "awake"])
@pytest.mark.parametrize("what", ["another shape", "unbound"])
def test_a_rebind_that_is_refused_leaves_all_asleep_and_may_be_repeated(
    initialise: Initialise, what: str, slept: bool
) -> None:
    layers, handle = worker(initialise)
    if slept:
        handle.release()
    bind(layers)
    good: Any = layers[1].kv_cache
    layers[1].kv_cache = caches(pages(7)) if what == "another shape" else ()
    with pytest.raises(statecopy.Error, match=r"model\.layers\.1") as caught:
        handle.rebind()
    assert (caught.value.code == "SIGNATURE_MISMATCH") == (what == "another shape")
    assert not handle.ready
    assert not any(layer._kda_state_copy_ready for layer in layers)
    layers[1].kv_cache = good
    handle.rebind()
    for layer in layers:
        layer.forward(torch.ones(1, 2, 8, 8), ROWS, TRUE)
        assert layer.kv_cache[1][3].eq(1).all()


def test_a_closed_worker_neither_sleeps_nor_wakes(initialise: Initialise) -> None:
    layers, handle = worker(initialise)
    handle.release()
    handle.close()
    handle.close()
    assert all(layer._ascend_kda_state_copy is None for layer in layers)
    for call in (handle.release, handle.rebind):
        with pytest.raises(statecopy.ClosedError, match="latest initialize_state_copy"):
            call()
