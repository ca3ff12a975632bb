"""The contract in plain torch indexing: what every byte must be after a copy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

import statecopy.torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Every type of a cache.
DTYPES = (
    *(torch.bool, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bfloat16, torch.float16, torch.int16, torch.uint16),
    *(torch.float32, torch.int32, torch.uint32),
    *(torch.float64, torch.int64, torch.uint64, torch.complex64),
)
FLAG_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16),
    *(torch.int32, torch.uint32, torch.int64, torch.uint64),
)
INDEX_DTYPES = (torch.int32, torch.int64)
# Elements between one payload and the next page, and before the first one.
GAP, OFFSET = 9, 4


def random_bytes(size: int, seed: int) -> torch.Tensor:
    """Bytes of every value: as floats, NaNs of all payloads, infinities and negative zeros are among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def random_states(shape: Sequence[int], dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    """The same as states, in torch's own memory."""
    return random_bytes(math.prod(shape) * dtype.itemsize, seed).view(dtype).view(*shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are equal in type, shape and every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


class Cache:
    """One layer in shareable memory, filled at random, with gaps, and what all of that memory must hold."""

    def __init__(
        self,
        shape: tuple[int, int, int, int] = (6, 2, 3, 5),
        dtype: torch.dtype = torch.float32,
        seed: int = 1,
    ) -> None:
        payload = math.prod(shape[1:])
        self.shape, self.dtype, self._page = shape, dtype, payload + GAP
        # Torch copies integers as they are; not so each truth value, whatever its byte.
        self._integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        size = (OFFSET + shape[0] * self._page) * dtype.itemsize
        self.memory = statecopy.torch.empty((size,), torch.uint8)
        self.memory.copy_(random_bytes(size, seed))
        self.expected = self.memory.clone()
        self.state = self._states(self.memory, dtype)

    def _states(self, memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        _, _, values, keys = self.shape
        strides = (self._page, values * keys, keys, 1)
        return memory.view(dtype).as_strided(self.shape, strides, OFFSET)

    def gathered(self, indices: torch.Tensor, flags: torch.Tensor | None = None) -> torch.Tensor:
        """What a gather must give."""
        state = self._states(self.expected, self._integer)
        packed = torch.zeros((len(indices), *self.shape[1:]), dtype=self._integer)
        kept = [True] * len(indices) if flags is None else [bool(flag) for flag in flags.flatten().tolist()]
        for place, row in enumerate(indices.tolist()):
            if 0 <= row < self.shape[0] and kept[place]:
                packed[place] = state[row]
        return packed.view(self.dtype)

    def scatter(self, packed: torch.Tensor, indices: torch.Tensor) -> None:
        """What a scatter must leave."""
        state, packed = self._states(self.expected, self._integer), packed.contiguous().view(self._integer)
        for place, row in enumerate(indices.tolist()):
            if 0 <= row < self.shape[0]:
                state[row] = packed[place]

    def check(self) -> None:
        """Every byte of the memory, gaps too."""
        assert torch.equal(self.memory, self.expected)

    def packed(self, selected: int, seed: int = 7) -> torch.Tensor:
        """Final states to scatter."""
        return random_states((selected, *self.shape[1:]), self.dtype, seed)


def plan_of(
    client: statecopy.torch.Client, cache: Cache, *, max_selected: int = 16, layers: bool = True
) -> statecopy.torch.Plan:
    """The plan of a client's only layer."""
    return client.register({"layers.0": cache.state}, max_selected=max_selected, layers=layers)["layers.0"]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def shared(values: torch.Tensor) -> torch.Tensor:
    """The same values in shareable memory."""
    copy = statecopy.torch.empty(values.shape, values.dtype)
    copy.copy_(values)
    return copy
