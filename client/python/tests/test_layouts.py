"""Layouts, indices and flags at random: whatever is valid moves as the contract says, and nothing else is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import statecopy
from oracle import DTYPES, Cache, Layout, bytes_of, plan_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daemon_process import Daemon

SIZES = st.integers(1, 9)
ANY_INDEX = st.one_of(
    st.integers(-3, 12), st.sampled_from([-(2**63), 2**63 - 1, -(2**31), 2**31 - 1, 2**32, 2**32 + 1])
)


@pytest.fixture(scope="module")
def shared_client(shared_daemon: Daemon) -> Iterator[statecopy.Client]:
    with statecopy.connect(shared_daemon.address) as client:
        yield client


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(
        shape=(draw(SIZES), draw(SIZES), draw(SIZES), draw(SIZES)),
        dtype=draw(st.sampled_from(DTYPES)),
        gap=draw(st.integers(0, 40)),
        offset=draw(st.integers(0, 40)),
    )


@st.composite
def copies(draw: st.DrawFn, layout: Layout) -> tuple[Any, Any, Any]:
    index_type = draw(st.sampled_from(["int32", "int64"]))
    bounds = np.iinfo(index_type)
    one = ANY_INDEX.filter(lambda index: bounds.min <= index <= bounds.max)
    indices = draw(st.lists(one, max_size=12))
    flags = draw(st.none() | st.lists(st.booleans(), min_size=len(indices), max_size=len(indices)))
    rows = range(layout.shape[0])
    distinct = draw(st.lists(one, max_size=12, unique_by=lambda index: index if index in rows else object()))
    as_indices = np.array(indices, dtype=index_type)
    return as_indices, flags if flags is None else np.array(flags, dtype=bool), np.array(distinct, dtype=index_type)


@given(data=st.data(), layout=layouts(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_valid_layout_is_copied_bit_for_bit(
    shared_client: statecopy.Client, data: st.DataObject, layout: Layout, seed: int
) -> None:
    cache = Cache(layout, seed)
    plan = plan_of(shared_client, cache, max_selected=12)
    for _ in range(3):
        indices, flags, distinct = data.draw(copies(layout))
        packed = plan.gather(indices, flags)
        assert packed.shape == (len(indices), *layout.shape[1:])
        assert bytes_of(packed) == cache.gathered(indices, flags)
        cache.check()
        final = cache.packed(len(distinct), seed)
        plan.scatter(final, distinct)
        cache.scatter(final, distinct)
        cache.check()
