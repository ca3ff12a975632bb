"""Binding sets: several layers of one signature by one request."""

from __future__ import annotations

import numpy as np
import pytest

import statecopy
from oracle import ALIGNMENT, Cache, Layout, bytes_of, caches_in_one_memory, int32, plan_of, random_bytes

# 96-byte payloads in pages of 128 bytes, so that layers one after the other lie equally to 16 bytes.
LAYOUT = Layout(shape=(6, 2, 3, 4), gap=8, offset=4)
LAYERS = [f"layers.{layer}" for layer in range(5)]


def registered(client: statecopy.Client) -> tuple[list[Cache], statecopy.Plans]:
    caches = caches_in_one_memory(LAYOUT, len(LAYERS))
    tensors = {name: cache.states for name, cache in zip(LAYERS, caches, strict=True)}
    sets = {"kda": LAYERS, "ends": [LAYERS[4], LAYERS[0]]}
    return caches, client.register(tensors, max_selected=8, sets=sets)


def test_gather_all_is_the_gather_of_each_layer_in_the_order_of_the_set(client: statecopy.Client) -> None:
    caches, plans = registered(client)
    indices, flags = int32(5, -1, 0, 0, 6), np.array([True, True, False, True, True])
    for name, members in (("kda", [0, 1, 2, 3, 4]), ("ends", [4, 0])):
        packed = plans.sets[name].gather_all(indices, flags)
        assert packed.shape == (len(members), 5, 2, 3, 4)
        assert bytes_of(packed) == b"".join(caches[member].gathered(indices, flags) for member in members)
    caches[0].check()


def test_scatter_all_writes_each_layer_its_own_states(client: statecopy.Client) -> None:
    caches, plans = registered(client)
    indices = int32(4, -1, 1)
    final = random_bytes(5 * 3 * LAYOUT.payload_bytes, 3).view("float32").reshape(5, 3, 2, 3, 4)
    plans.sets["kda"].scatter_all(final, indices)
    for cache, states in zip(caches, final, strict=True):
        cache.scatter(states, indices)
    caches[0].check()


def test_a_set_says_how_many_layers_it_has(client: statecopy.Client) -> None:
    _, plans = registered(client)
    assert set(plans) == set(LAYERS)
    assert len(plans) == 5
    assert set(plans.sets) == {"kda", "ends"}
    assert (plans.sets["kda"].layers, plans.sets["ends"].layers, plans[LAYERS[0]].layers) == (5, 2, 1)
    assert plans.sets["ends"].name == "ends"


def test_one_layer_may_be_in_no_set_and_a_set_may_hold_one_layer(client: statecopy.Client) -> None:
    cache, alone = Cache(LAYOUT), Cache(LAYOUT, seed=2)
    tensors = {"a": cache.states, "b": alone.states}
    plans = client.register(tensors, max_selected=4, sets={"one": ["b"]})
    packed = plans.sets["one"].gather_all(int32(2, 1))
    assert packed.shape == (1, 2, 2, 3, 4)
    assert bytes_of(packed) == alone.gathered([2, 1])


def test_layers_of_equal_layout_keep_their_own_names_and_states(client: statecopy.Client) -> None:
    caches, plans = registered(client)
    assert len({plans[name].signature for name in LAYERS}) == 1
    for cache, name in zip(caches, LAYERS, strict=True):
        assert plans[name].name == name
        assert bytes_of(plans[name].gather(int32(3))) == cache.gathered([3])


def test_unequal_layers_are_no_set_and_then_none_is_published(client: statecopy.Client) -> None:
    first, other = Cache(LAYOUT), Cache(Layout(shape=(6, 2, 3, 5)))
    old = plan_of(client, first)
    with pytest.raises(statecopy.PlanError) as caught:
        client.register({"a": first.states, "b": other.states}, max_selected=4, sets={"bad": ["a", "b"]})
    assert caught.value.code == "SIGNATURE_MISMATCH"
    with pytest.raises(statecopy.PlanError) as caught:
        old.gather(int32(1))
    assert caught.value.code in ("STALE_PLAN", "NOT_SEALED")


def test_a_set_of_a_layer_that_is_not_registered_is_refused_by_its_name(client: statecopy.Client) -> None:
    cache = Cache(LAYOUT)
    with pytest.raises(statecopy.ArgumentError, match=r"layers\.7"):
        client.register({"layers.0": cache.states}, max_selected=4, sets={"kda": ["layers.0", "layers.7"]})


def test_packed_of_a_set_has_an_axis_more(client: statecopy.Client) -> None:
    caches, plans = registered(client)
    wrong = np.zeros((3, 2, 3, 4), dtype="float32")
    with pytest.raises(statecopy.ArgumentError, match="packed"):
        plans.sets["kda"].scatter_all(wrong, int32(1, 2, 3))
    caches[0].check()


def test_the_layout_of_these_tests_is_one_signature() -> None:
    assert LAYOUT.page_bytes % ALIGNMENT == 0
