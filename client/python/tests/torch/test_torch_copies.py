"""Gather and scatter over torch's tensors, bit for bit (contract: Gather, Scatter, Both)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import statecopy.torch
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
    shared,
)

if TYPE_CHECKING:
    from daemon_process import Daemon


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_every_dtype_moves_bit_for_bit_both_ways(
    client: statecopy.torch.Client, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    cache = Cache(dtype=dtype)
    plan = plan_of(client, cache)
    indices = torch.tensor([3, -1, 0, 6, 5, 3], dtype=index_dtype)
    flags = torch.tensor([True, True, True, True, False, True])
    packed = plan.gather(indices, flags)
    assert same_bits(packed, cache.gathered(indices, flags))
    cache.check()

    final, distinct = cache.packed(4), torch.tensor([5, 6, -1, 2], dtype=index_dtype)
    plan.scatter(final, distinct)
    cache.scatter(final, distinct)
    cache.check()


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_every_count_from_none_to_the_most_is_served(client: statecopy.torch.Client, index_dtype: torch.dtype) -> None:
    cache = Cache((40, 1, 3, 5), torch.bfloat16)
    plan = plan_of(client, cache, max_selected=33)
    for selected in range(34):
        indices = torch.tensor([39, -1, 7, 7, 40, 0], dtype=index_dtype).repeat(6)[:selected]
        packed = plan.gather(indices)
        assert same_bits(packed, cache.gathered(indices)), f"{selected} rows"
        final, distinct = cache.packed(selected, seed=selected), torch.arange(selected, dtype=index_dtype)
        plan.scatter(final, distinct)
        cache.scatter(final, distinct)
        cache.check()


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_the_extremes_of_an_index_type_are_merely_invalid(client: statecopy.torch.Client, dtype: torch.dtype) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    limits = torch.iinfo(dtype)
    indices = torch.tensor([limits.min, limits.max, -1, 6, 0, 5], dtype=dtype)
    assert same_bits(plan.gather(indices), cache.gathered(indices))
    final = cache.packed(6)
    plan.scatter(final, indices)
    cache.scatter(final, indices)
    cache.check()


@pytest.mark.parametrize("dtype", FLAG_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4), (2, 2), (1, 2, 1, 2)], ids=str)
def test_flags_of_any_integer_type_and_shape_are_true_unless_zero(
    client: statecopy.torch.Client, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    # Where one byte holds less, a value whose lowest byte is zero is true all the same.
    top = 1 << (8 * dtype.itemsize - 2)
    flags = torch.tensor([1, 0, top, 0]).to(dtype).view(shape)
    indices = int32(1, 2, 3, 4)
    assert same_bits(plan.gather(indices, flags), cache.gathered(indices, flags))
    assert same_bits(plan.gather(indices, shared(flags)), cache.gathered(indices, flags))


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_strided_and_unaligned_indices_and_flags_serve_as_well(
    client: statecopy.torch.Client, index_dtype: torch.dtype
) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    wide = torch.tensor([3, 9, -1, 9, 0, 9, 5, 9], dtype=index_dtype)
    flags = torch.tensor([[1, 0], [0, 1], [1, 1], [1, 0]], dtype=torch.uint8)
    for make in (torch.clone, shared):
        memory, truths = make(wide), make(flags)
        strided, column = memory[::2], truths[:, :1]
        assert same_bits(plan.gather(strided, column), cache.gathered(strided, column))
        unaligned, row = memory[1:4], truths.view(-1)[1:4]
        assert same_bits(plan.gather(unaligned, row), cache.gathered(unaligned, row))
        plan.scatter(packed := cache.packed(4), strided)
        cache.scatter(packed, strided)
        cache.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_final_states_are_made_contiguous_in_the_dtype_of_the_cache(
    client: statecopy.torch.Client, dtype: torch.dtype
) -> None:
    cache = Cache(dtype=dtype)
    plan = plan_of(client, cache)
    indices = int32(4, -1, 0)
    given = torch.randn(3, 2, 5, 3, dtype=torch.float64).transpose(2, 3)
    plan.scatter(given, indices)
    cache.scatter(given.to(dtype), indices)
    cache.check()


def test_a_tensor_that_requires_a_gradient_is_scattered_like_another(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    final = torch.randn(2, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    plan.scatter(final, int32(1, 2))
    cache.scatter(final.detach().float(), int32(1, 2))
    cache.check()
    assert not plan.gather(int32(1)).requires_grad


def test_gather_writes_where_its_caller_says(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    indices = int32(2, -1)
    for out in (torch.empty(2, 2, 3, 5), statecopy.torch.empty((2, 2, 3, 5), torch.float32)):
        assert plan.gather(indices, out=out) is out
        assert same_bits(out, cache.gathered(indices))


def test_a_binding_set_is_copied_by_one_call(client: statecopy.torch.Client) -> None:
    caches = [Cache((6, 2, 4, 4), torch.bfloat16, seed=seed) for seed in range(3)]
    states = {f"layers.{layer}": cache.state for layer, cache in enumerate(caches)}
    plans = client.register(states, max_selected=8, sets={"kda": list(states)})
    kda = plans.sets["kda"]
    assert [plan.name for plan in kda.plans] == list(states)
    indices, flags = int64(5, -1, 0), torch.tensor([1, 1, 0])
    packed = kda.gather_all(indices, flags)
    assert same_bits(packed, torch.stack([cache.gathered(indices, flags) for cache in caches]))
    final = random_states((3, 3, 2, 4, 4), torch.bfloat16)
    kda.scatter_all(final, indices)
    for cache, of_layer in zip(caches, final, strict=True):
        cache.scatter(of_layer, indices)
        cache.check()
    pending = kda.submit_gather_all(indices)
    assert same_bits(pending.wait(), torch.stack([cache.gathered(indices) for cache in caches]))


def test_submitted_copies_give_tensors_when_they_are_waited_for(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    first = plan.submit_gather(int32(1, 2))
    assert same_bits(first.wait(), cache.gathered(int32(1, 2)))
    final = cache.packed(1)
    assert plan.submit_scatter(final, int32(3)).wait() is None
    cache.scatter(final, int32(3))
    cache.check()


def test_a_result_lives_as_long_as_any_view_of_it(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    view = plan.gather(int32(1, 2))[1, 0]
    expected = cache.gathered(int32(2))[0, 0]
    held = client.counters()["pool_bytes_in_use"]
    assert held > 0
    for _ in range(20):
        plan.gather(int32(3, 4, 5))
    assert same_bits(view, expected)
    del view
    assert client.counters()["pool_bytes_in_use"] < held


def test_a_result_outlives_its_client(shared_daemon: Daemon) -> None:
    cache = Cache()
    with statecopy.torch.connect(shared_daemon.address) as client:
        packed = plan_of(client, cache).gather(int32(1, 2))
    assert same_bits(packed, cache.gathered(int32(1, 2)))


def test_the_pool_does_not_grow_with_the_number_of_gathers(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    indices = int32(1, 2, 3)
    plan.gather(indices)
    before = client.counters()["pool_bytes"]
    for _ in range(1000):
        plan.gather(indices)
    assert client.counters()["pool_bytes"] == before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_layout_any_indices(shared_daemon: Daemon, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 9))
    shape = (rows, *data.draw(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9))))
    cache = Cache(shape, data.draw(st.sampled_from(DTYPES)), seed=data.draw(st.integers(0, 99)))
    selected = data.draw(st.integers(0, 12))
    index = st.one_of(st.integers(-2, rows + 2), st.sampled_from([-(2**31), 2**31 - 1]))
    values = data.draw(st.lists(index, min_size=selected, max_size=selected))
    indices = torch.tensor(values, dtype=data.draw(st.sampled_from(INDEX_DTYPES)))
    flags = None
    if data.draw(st.booleans()):
        flags = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=selected, max_size=selected)))
        flags = flags.to(data.draw(st.sampled_from(FLAG_DTYPES)))
    if data.draw(st.booleans()):
        indices, flags = shared(indices) if selected else indices, flags
    with statecopy.torch.connect(shared_daemon.address) as client:
        plan = plan_of(client, cache)
        assert same_bits(plan.gather(indices, flags), cache.gathered(indices, flags))
        valid = list(dict.fromkeys(value for value in values if 0 <= value < rows))
        destinations = torch.tensor([*valid, -1, rows], dtype=indices.dtype)
        final = random_states((len(destinations), *shape[1:]), cache.dtype)
        plan.scatter(final, destinations)
        cache.scatter(final, destinations)
        cache.check()
    assert math.prod(shape) == cache.state.numel()
