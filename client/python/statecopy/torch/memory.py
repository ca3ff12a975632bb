"""Shareable host memory as torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

import statecopy

# Of each item size, the type in which bytes are moved: DLPack does not name all types of torch.
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name without its module: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: torch.dtype | str) -> torch.dtype:
    """The type of that name.

    Raises ``ArgumentError`` when torch has none.
    """
    found = getattr(torch, dtype_name(name), None)
    if isinstance(found, torch.dtype):
        return found
    raise statecopy.ArgumentError(
        f"dtype is {name!r}, which is no type of torch {torch.__version__}",
        remedy="Name a type as torch does, such as 'bfloat16'.",
        about="dtype",
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size: copies of these change no bit."""
    return tensor.view(INTEGER_OF_SIZE[tensor.element_size()])


def empty(shape: Sequence[int], dtype: torch.dtype | str, strides: Sequence[int] | None = None) -> torch.Tensor:
    """A tensor over host memory that the daemon can share, for a worker that has none. All bytes are zero.

    ``shape`` and ``strides`` are in elements. Packed, indices and flags in such memory are read where they lie.
    """
    found = dtype_of(dtype)
    size = INTEGER_OF_SIZE.get(found.itemsize)
    if size is None:
        raise statecopy.ArgumentError(
            f"dtype is {dtype}, of {found.itemsize} bytes; items have 1, 2, 4 or 8 bytes",
            remedy="View the memory as a type of such a size.",
            about="dtype",
        )
    memory = statecopy.empty(tuple(shape), dtype_name(size), strides=None if strides is None else tuple(strides))
    return from_dlpack(memory).view(found)
