"""How indices, flags and packed tensors travel: as they are where that is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import statecopy.torch
from statecopy.torch.hooks import Hooks
from torch_oracle import FLAG_DTYPES, INDEX_DTYPES, Cache, int32, plan_of, same_bits, shared

if TYPE_CHECKING:
    from collections.abc import Callable


def grown(client: statecopy.torch.Client, act: Callable[[], object]) -> dict[str, int]:
    """By how much the counters grew meanwhile."""
    before = client.counters()
    act()
    return {name: value - before[name] for name, value in client.counters().items()}


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_aligned_contiguous_indices_in_shared_memory_are_used_as_they_are(
    client: statecopy.torch.Client, dtype: torch.dtype
) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    indices = shared(torch.tensor([3, -1, 0, 5], dtype=dtype))
    route = plan.route(indices)
    # Widened, strided or copied, it would lie elsewhere.
    assert (route.how, route.address) == ("in_place", indices.data_ptr())
    done = grown(client, lambda: plan.gather(indices))
    assert done["operands_in_place"] == 1
    assert done["operands_copied"] == done["operands_inline"] == done["normalised"] == 0
    assert same_bits(plan.gather(indices), cache.gathered(indices))


def test_indices_of_torchs_own_host_memory_go_with_the_request(client: statecopy.torch.Client) -> None:
    plan = plan_of(client, Cache())
    assert plan.route(int32(1, 2)).how == "inline"
    assert plan.route(int32(1, 2, 3, 4)[::2]).how == "inline"


def test_flags_of_one_byte_in_shared_memory_are_used_as_they_are(client: statecopy.torch.Client) -> None:
    plan = plan_of(client, Cache())
    indices, flags = shared(int32(1, 2, 3)), torch.tensor([2, 0, 255])
    for dtype in (torch.uint8, torch.int8, torch.bool):
        given = shared(flags.to(dtype))
        done = grown(client, lambda given=given: plan.gather(indices, given))  # type: ignore[misc]
        assert (done["operands_in_place"], done["normalised"]) == (2, 0), dtype


def test_final_states_in_shared_memory_are_read_where_they_lie(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    indices, packed = shared(int32(1, 2)), shared(cache.packed(2))
    done = grown(client, lambda: plan.scatter(packed, indices))
    assert (done["operands_in_place"], done["operands_copied"]) == (2, 0)
    gathered = plan.gather(indices)
    done = grown(client, lambda: plan.scatter(gathered, indices))
    assert (done["operands_in_place"], done["operands_copied"]) == (2, 0), "a result of a gather is shared already"


def test_what_cannot_be_shared_is_copied_once_and_counted(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    packed = cache.packed(2)
    done = grown(client, lambda: plan.scatter(packed, int32(1, 2)))
    assert (done["operands_copied"], done["bytes_copied_to_share"]) == (1, packed.nbytes)
    assert done["normalised"] == 0
    done = grown(client, lambda: plan.scatter(packed.double(), int32(1, 2)))
    assert (done["normalised"], done["operands_copied"]) == (1, 1)


def test_after_a_freeze_memory_that_is_new_is_copied(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    known, new = shared(int32(1, 2)), shared(int32(3, 4))
    plan.gather(known)
    client.freeze()
    assert plan.route(known).how == "in_place"
    assert plan.route(new).how != "in_place"
    assert same_bits(plan.gather(new), cache.gathered(new))


def test_trim_gives_back_what_nobody_uses(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    packed = plan.gather(int32(1, 2))
    in_use = client.counters()["pool_bytes_in_use"]
    client.trim()
    assert client.counters()["pool_bytes"] == client.counters()["pool_bytes_in_use"] == in_use
    assert same_bits(packed, cache.gathered(int32(1, 2)))
    del packed
    assert client.trim() > 0
    assert client.counters()["pool_bytes"] == 0
    assert same_bits(plan.gather(int32(1, 2)), cache.gathered(int32(1, 2)))


class TestNormalising:
    """The hook, which a device's operands pass (there is none here)."""

    @pytest.mark.parametrize("dtype", FLAG_DTYPES, ids=str)
    def test_flags_become_a_vector_of_one_byte_each(self, dtype: torch.dtype) -> None:
        top = 1 << (8 * dtype.itemsize - 2)
        flags = torch.tensor([[0, 1, 9], [top, 0, 1]]).to(dtype)[:, :2]
        made = Hooks(None).normalise("flags", flags, "bool")
        assert (made.shape, made.element_size(), made.is_contiguous()) == ((4,), 1, True)
        assert made.data_ptr() % 16 == 0
        assert made.bool().tolist() == [False, True, True, False]

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool], ids=str)
    def test_flags_of_one_byte_are_only_viewed(self, dtype: torch.dtype) -> None:
        flags = torch.zeros(2, 8, dtype=dtype)
        assert Hooks(None).normalise("flags", flags, "bool").data_ptr() == flags.data_ptr()

    @pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
    def test_indices_keep_their_dtype(self, dtype: torch.dtype) -> None:
        memory = torch.arange(9, dtype=dtype)
        for indices in (memory[::2], memory[1:]):
            made = Hooks(None).normalise("indices", indices, str(dtype))
            assert made.dtype is dtype
            assert made.tolist() == indices.tolist()
            assert made.is_contiguous()
            assert made.data_ptr() % 16 == 0

    def test_final_states_become_contiguous_in_the_dtype_of_the_cache(self) -> None:
        packed = torch.randn(2, 3, 5, 4).transpose(2, 3)
        made = Hooks(None).normalise("packed", packed, "bfloat16")
        assert made.is_contiguous()
        assert same_bits(made, packed.bfloat16().contiguous())

    def test_a_tensor_is_staged_as_it_is(self) -> None:
        into, packed = torch.zeros(2, 3), torch.randn(3, 2).T
        Hooks(None).stage(into, packed)
        assert same_bits(into, packed.contiguous())
