"""Gather and scatter over NumPy's arrays, bit for bit (contract: Gather, Scatter, Both)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import statecopy
from oracle import DTYPES, Cache, Layout, bytes_of, every, int32, int64, plan_of, random_bytes, shared_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from daemon_process import Daemon

INT32, INT64 = np.iinfo(np.int32), np.iinfo(np.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_type", ["int32", "int64"])
def test_every_dtype_moves_bit_for_bit_both_ways(client: statecopy.Client, dtype: str, index_type: str) -> None:
    cache = Cache(Layout(dtype=dtype))
    plan = plan_of(client, cache)
    indices = np.array([3, -1, 0, 6, 5, 3], dtype=index_type)
    flags = [True, True, True, True, False, True]

    packed = plan.gather(indices, np.array(flags))
    assert packed.shape == (6, 2, 3, 5)
    assert packed.dtype == dtype
    assert bytes_of(packed) == cache.gathered(indices, flags)
    cache.check()

    final, distinct = cache.packed(4), np.array([5, 6, -1, 2], dtype=index_type)
    plan.scatter(final, distinct)
    cache.scatter(final, distinct)
    cache.check()


def test_bfloat16_goes_through_memory_of_its_own(client: statecopy.Client) -> None:
    cache = statecopy.empty((4, 2, 3, 5), "bfloat16")
    plan = client.register({"layers.0": cache}, max_selected=4)["layers.0"]
    first = plan.gather(int32(1, 2))
    assert (first.dtype, first.shape) == ("bfloat16", (2, 2, 3, 5))
    plan.scatter(first, int32(3, 0))
    with pytest.raises(TypeError, match="DLPack"):
        np.asarray(first)


@pytest.mark.parametrize(
    "indices",
    [
        pytest.param(int32(INT32.min, INT32.max, -1, 6, 0, 5), id="extremes of int32"),
        pytest.param(int64(INT64.min, INT64.max, -1, 6, 0, 5), id="extremes of int64"),
        pytest.param(int64(2**32, 2**32 + 1, -(2**32), 2**31, -(2**31), 5), id="what 32 bits would take for rows"),
    ],
)
def test_an_index_out_of_range_clears_its_gathered_row_and_scatters_nothing(
    client: statecopy.Client, indices: NDArray[np.signedinteger]
) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    assert bytes_of(plan.gather(indices)) == cache.gathered(indices)
    final = cache.packed(len(indices))
    plan.scatter(final, indices)
    cache.scatter(final, indices)
    cache.check()


@pytest.mark.parametrize("index_type", ["int32", "int64"])
def test_every_count_from_none_to_the_most_is_served(client: statecopy.Client, index_type: str) -> None:
    cache = Cache(Layout(shape=(40, 1, 3, 5)))
    plan = plan_of(client, cache, max_selected=33)
    for selected in range(34):
        indices = every(selected, [39, -1, 7, 7, 40, 0]).astype(index_type)
        packed = plan.gather(indices)
        assert packed.shape == (selected, 1, 3, 5)
        assert bytes_of(packed) == cache.gathered(indices), f"{selected} rows"
        final, distinct = cache.packed(selected, seed=selected), np.arange(selected, dtype=index_type)
        plan.scatter(final, distinct)
        cache.scatter(final, distinct)
        cache.check()


def test_a_row_may_be_gathered_many_times(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    indices = int32(*[4] * 16)
    assert bytes_of(plan.gather(indices)) == cache.gathered(indices)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4), (2, 2)])
def test_flags_of_any_integer_type_and_shape_are_true_unless_zero(
    client: statecopy.Client, dtype: str, shape: tuple[int, ...]
) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    # Where one byte holds less, a value whose lowest byte is zero is true all the same.
    top = np.array([True]) if dtype == "bool" else np.array([np.iinfo(dtype).max // 255 * 128], dtype=dtype)
    flags = np.array([1, 0, top[0], 0], dtype=dtype).reshape(shape)
    indices = int32(1, 2, 3, 4)
    assert bytes_of(plan.gather(indices, flags)) == cache.gathered(indices, flags.reshape(-1))


@pytest.mark.parametrize("flags", [[True] * 3, [False] * 3, [True, False, True]])
def test_flags_may_be_a_list_and_so_may_indices(client: statecopy.Client, flags: list[bool]) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    assert bytes_of(plan.gather([5, 0, -1], flags)) == cache.gathered([5, 0, -1], flags)
    final = cache.packed(3)
    plan.scatter(final, [2, 6, 1])
    cache.scatter(final, [2, 6, 1])
    cache.check()


def test_indices_and_flags_lie_however_they_like(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    spread = np.array([[1, 9], [5, 9], [-1, 9], [0, 9]], dtype=np.int64)
    unaligned = np.frombuffer(bytes(1) + int32(1, 5, -1, 0).tobytes(), dtype=np.int32, offset=1)
    read_only = int32(1, 5, -1, 0)
    read_only.flags.writeable = False
    flags = np.array([1, 0, 1, 0, 1, 0, 0, 0], dtype=np.uint8)
    for indices in (spread[:, 0], spread[::-1, 0], unaligned, read_only):
        assert bytes_of(plan.gather(indices, flags[::2])) == cache.gathered(indices, flags[::2])


def test_indices_and_flags_in_shared_memory_are_used_where_they_lie(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    indices = np.asarray(statecopy.empty((4,), "int32"))
    flags = np.asarray(statecopy.empty((4,), "bool"))
    indices[:], flags[:] = [3, -1, 5, 0], [True, True, False, True]
    assert bytes_of(plan.gather(indices, flags)) == cache.gathered(indices, flags)
    indices[:], flags[:] = [0, 1, 2, 6], [True, False, True, True]
    assert bytes_of(plan.gather(indices, flags)) == cache.gathered(indices, flags)
    route = plan.route(indices)
    assert (route.how, route.address) == ("in_place", indices.ctypes.data)
    assert plan.route(int32(1, 2)).how == "inline"


@pytest.mark.parametrize("where", ["shared", "of NumPy"])
def test_gather_into_a_buffer_of_the_caller_returns_that_buffer(client: statecopy.Client, where: str) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    indices = int32(5, 6, 1)
    shape = (3, 2, 3, 5)
    out = np.asarray(statecopy.empty(shape, "float32")) if where == "shared" else np.empty(shape, "float32")
    out.view(np.uint8)[:] = 0xA5
    assert plan.gather(indices, out=out) is out
    assert bytes_of(out) == cache.gathered(indices)


@pytest.mark.parametrize("where", ["shared", "of NumPy", "result of a gather", "unaligned"])
def test_final_states_are_taken_from_wherever_they_lie(client: statecopy.Client, where: str) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    final = cache.packed(3)
    given = final
    if where == "shared":
        given = shared_bytes(final.nbytes, 3).view("float32").reshape(final.shape)
        final = given.copy()
    elif where == "result of a gather":
        given = np.asarray(plan.gather(int32(0, 1, 2)))
        given.view(np.uint8)[:] = final.view(np.uint8)
    elif where == "unaligned":
        given = np.ndarray(final.shape, final.dtype, buffer=shared_bytes(final.nbytes + 4, 3), offset=4)
        final = given.copy()
    indices = int32(4, -1, 0)
    plan.scatter(given, indices)
    cache.scatter(final, indices)
    cache.check()


def test_what_is_behind_and_before_a_packed_buffer_stays(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    around = shared_bytes(16 + 2 * cache.layout.payload_bytes + 16, seed=5)
    before = around.copy()
    packed = np.ndarray((2, 2, 3, 5), "float32", buffer=around, offset=16)
    plan.gather(int32(5, -1), out=packed)
    inner = slice(16, 16 + packed.nbytes)
    before[inner] = np.frombuffer(cache.gathered([5, -1]), dtype=np.uint8)
    np.testing.assert_array_equal(around, before)


def test_a_tensor_outlives_the_next_gather_and_its_client(daemon: Daemon) -> None:
    cache = Cache()
    with statecopy.connect(daemon.address) as client:
        plan = plan_of(client, cache)
        first = plan.gather(int32(1))
        view = np.asarray(first)[0, 1]
        expected = view.copy()
        del first
        for row in range(6):
            plan.gather(int32(row))
    np.testing.assert_array_equal(view.view(np.uint32), expected.view(np.uint32))


def test_rows_past_four_gigabytes_are_reached(client: statecopy.Client) -> None:
    # A page stride past 4 GiB: pages that nobody touches cost nothing.
    page = (1 << 30) + 64
    cache = statecopy.empty((3, 1, 4, 8), "float32", strides=(page, 32, 8, 1))
    states = np.asarray(cache)
    states[:] = np.array([1, 2, 3], dtype=np.float32)[:, None, None, None]
    plan = client.register({"layers.0": cache}, max_selected=4)["layers.0"]
    packed = np.asarray(plan.gather(int32(2, 0, 3, 1)))
    assert packed[:, 0, 0, 0].tolist() == [3, 1, 0, 2]
    plan.scatter(packed, int32(1, 2, -1, 0))
    assert states[:, 0, 3, 7].tolist() == [2, 3, 1]


@pytest.mark.parametrize("payload", [1, 3, 16, 8191, 8192, 8193, 40_000])
def test_payloads_below_at_and_above_one_block_move(client: statecopy.Client, payload: int) -> None:
    cache = Cache(Layout(shape=(5, 1, 1, payload), dtype="uint8", gap=3, offset=1))
    plan = plan_of(client, cache)
    indices = int32(4, 0, -1, 2, 4)
    assert bytes_of(plan.gather(indices)) == cache.gathered(indices)
    final = cache.packed(3)
    plan.scatter(final, indices[:3])
    cache.scatter(final, indices[:3])
    cache.check()


def test_what_a_plan_says_of_itself_is_what_was_registered(client: statecopy.Client) -> None:
    cache = Cache(Layout(shape=(6, 2, 3, 5), dtype="float16"))
    plan = plan_of(client, cache, max_selected=9)
    assert (plan.name, plan.dtype, tuple(plan.shape), plan.layers) == ("layers.0", "float16", (6, 2, 3, 5), 1)
    assert (plan.max_selected, plan.payload_bytes) == (9, 60)
    assert plan.signature
    assert "layers.0" in repr(plan)


def test_counters_tell_what_moved_and_how_operands_travelled(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    before = client.counters()
    packed = plan.gather(int32(1, -1, 2))
    plan.scatter(packed, int32(1, 2, 3))
    plan.scatter(cache.packed(1), int32(1))
    grown = {name: value - before[name] for name, value in client.counters().items()}
    assert (grown["gathers"], grown["scatters"]) == (1, 2)
    assert grown["operands_inline"] == 3
    assert grown["operands_copied"] == 1
    assert grown["bytes_copied_to_share"] == cache.layout.payload_bytes


def _random_indices(rng: np.random.Generator, rows: int, selected: int) -> Sequence[int]:
    return [int(index) for index in rng.integers(-2, rows + 2, selected)]


def test_a_long_run_of_random_copies_leaves_what_the_contract_says(client: statecopy.Client) -> None:
    cache = Cache(Layout(shape=(12, 2, 5, 7), dtype="float64", gap=5, offset=2))
    plan = plan_of(client, cache)
    rng = np.random.default_rng(11)
    for step in range(300):
        indices = _random_indices(rng, 12, int(rng.integers(0, 17)))
        flags = rng.integers(0, 2, len(indices)).astype(bool)
        packed = plan.gather(np.array(indices, dtype=["int32", "int64"][step % 2]), flags)
        assert bytes_of(packed) == cache.gathered(indices, flags)
        distinct = rng.permutation(14)[: rng.integers(0, 13)] - 1
        final = random_bytes(len(distinct) * cache.layout.payload_bytes, step).view("float64").reshape(-1, 2, 5, 7)
        plan.scatter(final, distinct)
        cache.scatter(final, distinct)
    cache.check()
