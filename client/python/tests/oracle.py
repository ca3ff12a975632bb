"""The contract, once more and plainly: what every byte of a cache and of a packed buffer must be after a copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

import statecopy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

# Every type of a cache that NumPy has a name for, of each item size.
DTYPES = (
    *("bool", "int8", "uint8"),
    *("float16", "int16", "uint16"),
    *("float32", "int32", "uint32"),
    *("float64", "int64", "uint64", "complex64"),
)
ALIGNMENT = 16


@dataclass(frozen=True)
class Layout:
    """Where a cache's payloads lie in its memory."""

    shape: tuple[int, int, int, int] = (6, 2, 3, 5)
    dtype: str = "float32"
    # Elements between one payload and the next page.
    gap: int = 7
    # Before the first page, in items.
    offset: int = 4

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def payload_bytes(self) -> int:
        _, heads, values, keys = self.shape
        return heads * values * keys * self.itemsize

    @property
    def page_bytes(self) -> int:
        return self.payload_bytes + self.gap * self.itemsize

    def bytes_until(self, layers: int) -> int:
        """Bytes of memory that holds so many layers, one after the other, with room behind the last page."""
        return (self.offset * self.itemsize + self.shape[0] * self.page_bytes) * layers + ALIGNMENT


class Cache:
    """One layer in memory that the daemon can share, filled at random, and what all of that memory must hold."""

    def __init__(self, layout: Layout = Layout(), seed: int = 1) -> None:
        self.layout = layout
        self.bytes = shared_bytes(layout.bytes_until(1), seed)
        self.expected = self.bytes.copy()
        self.states = states_in(self.bytes, layout)

    def rows(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The payloads in such memory, ``[N, bytes]``."""
        layout = self.layout
        start, pages = layout.offset * layout.itemsize, layout.shape[0] * layout.page_bytes
        by_page = memory[start : start + pages].reshape(layout.shape[0], layout.page_bytes)
        return by_page[:, : layout.payload_bytes]

    def gathered(self, indices: Iterable[int], flags: Iterable[Any] | None = None) -> bytes:
        """What a gather must return."""
        rows = self.rows(self.expected)
        wanted = [int(index) for index in indices]
        kept = [True] * len(wanted) if flags is None else [bool(flag) for flag in flags]
        cleared = bytes(self.layout.payload_bytes)
        in_range = range(self.layout.shape[0])
        chosen = zip(wanted, kept, strict=True)
        return b"".join(rows[index].tobytes() if index in in_range and kept else cleared for index, kept in chosen)

    def scatter(self, packed: NDArray[Any], indices: Iterable[int]) -> None:
        """What a scatter must leave."""
        rows = self.rows(self.expected)
        sources = np.ascontiguousarray(packed).view(np.uint8).reshape(packed.shape[0], self.layout.payload_bytes)
        for source, index in zip(sources, map(int, indices), strict=True):
            if index in range(self.layout.shape[0]):
                rows[index] = source

    def check(self) -> None:
        """Every byte of the memory, gaps and surroundings too."""
        wrong = np.flatnonzero(self.bytes != self.expected)
        assert wrong.size == 0, f"{wrong.size} bytes differ, the first one at {wrong[:1]} of {self.bytes.size}"

    def packed(self, selected: int, seed: int = 7) -> NDArray[Any]:
        """Final states to scatter: memory of NumPy's own, which nobody shares."""
        return random_bytes(selected * self.layout.payload_bytes, seed).view(self.layout.dtype).reshape(
            selected, *self.layout.shape[1:]
        )  # fmt: skip


def caches_in_one_memory(layout: Layout, layers: int, seed: int = 1) -> list[Cache]:
    """Layers of one layout that lie in one memory, one after the other; all expect the whole of it."""
    one = layout.offset * layout.itemsize + layout.shape[0] * layout.page_bytes
    assert one % ALIGNMENT == 0, "layers of one signature lie equally to 16 bytes"
    memory = shared_bytes(layout.bytes_until(layers), seed)
    expected = memory.copy()
    made = []
    for layer in range(layers):
        cache = Cache.__new__(Cache)
        cache.layout = replace(layout, offset=layout.offset + layer * one // layout.itemsize)
        cache.bytes, cache.expected = memory, expected
        cache.states = states_in(memory, cache.layout)
        made.append(cache)
    return made


def random_bytes(size: int, seed: int) -> NDArray[np.uint8]:
    """Bytes of every value: as floats, NaNs of all payloads, infinities and negative zeros are among them."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def shared_bytes(size: int, seed: int) -> NDArray[np.uint8]:
    """The same in memory that the daemon can share."""
    memory: NDArray[np.uint8] = np.asarray(statecopy.empty((size,), "uint8"))
    memory[:] = random_bytes(size, seed)
    return memory


def states_in(memory: NDArray[np.uint8], layout: Layout) -> NDArray[Any]:
    """``[N, H, V, K]`` over such memory."""
    _, heads, values, keys = layout.shape
    item = layout.itemsize
    strides = (layout.page_bytes, heads and values * keys * item, keys * item, item)
    offset = layout.offset * item
    return np.ndarray(layout.shape, layout.dtype, buffer=memory, offset=offset, strides=strides)


def plan_of(
    client: statecopy.Client, cache: Cache, *, max_selected: int = 16, check_unique: bool = False
) -> statecopy.Plan:
    """The plan of a client's only layer."""
    plans = client.register({"layers.0": cache.states}, max_selected=max_selected, check_unique=check_unique)
    return plans["layers.0"]


def bytes_of(packed: Any) -> bytes:
    """All bytes of a tensor, in the order of its elements."""
    return np.ascontiguousarray(np.asarray(packed)).tobytes()


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def int64(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def every(selected: int, values: Sequence[int]) -> NDArray[np.int32]:
    """So many indices, taken from these in turn."""
    return np.resize(np.array(values, dtype=np.int32), selected)
