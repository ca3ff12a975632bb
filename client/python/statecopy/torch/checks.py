"""What a copy's tensors must be, told from their metadata alone: no pointer and no value is read.

The same rules serve fake tensors while a model is traced, where sizes are symbols, and the local copy. The daemon
checks its requests itself (contract: Cache, Both).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from statecopy.errors import ArgumentError
from statecopy.torch.memory import INTEGER_OF_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

INDEX_TYPES = (torch.int32, torch.int64)
STATE_RANK = 4

_REMEDIES = {
    "DEVICE_NOT_VISIBLE": "Move the tensor to the device of the state.",
    "FLAGS_MISMATCH": "Give one flag of an integer or bool type for each index.",
    "INDEX_TYPE": "Give a vector of INT32 or INT64.",
    "LAYOUT_INVALID": "Bind [N, H, V, K] with a dense [H, V, K] and pages that do not overlap.",
    "PACKED_MISMATCH": "Give packed as [selected, H, V, K].",
    "SELECTED_TOO_LARGE": "Select fewer rows, or register with a larger max_selected.",
}


def check_state(state: torch.Tensor) -> None:
    """``[N, H, V, K]``, N > 0, the payload dense, the pages apart, items of 1, 2, 4 or 8 bytes."""
    _require(state.dim() == STATE_RANK, "LAYOUT_INVALID", "state", f"state has {state.dim()} axes; it must have 4")
    itemsize = state.dtype.itemsize
    _require(
        itemsize in INTEGER_OF_SIZE,
        "LAYOUT_INVALID",
        "state",
        f"state is {state.dtype}, of {itemsize} bytes; items have 1, 2, 4 or 8",
    )
    payload: int = 1
    for axis in (3, 2, 1):
        size, stride = state.shape[axis], state.stride(axis)
        _require(size > 0, "LAYOUT_INVALID", "state", f"axis {axis} of state has the size {size}; it must be > 0")
        _require(
            size == 1 or stride == payload,
            "LAYOUT_INVALID",
            "state",
            f"axis {axis} of state has the stride {stride}; a dense payload has {payload}",
        )
        payload *= size
    _require(state.shape[0] > 0, "LAYOUT_INVALID", "state", f"state has {state.shape[0]} rows; it must have > 0")
    _require(
        state.stride(0) >= payload,
        "LAYOUT_INVALID",
        "state",
        f"the page stride of state is {state.stride(0)}; one payload is {payload}",
    )


def check_indices(state: torch.Tensor, indices: torch.Tensor) -> None:
    """A vector of INT32 or INT64 on the state's device."""
    _require(indices.dim() == 1, "INDEX_TYPE", "indices", f"indices has {indices.dim()} axes; it must have 1")
    _require(
        indices.dtype in INDEX_TYPES,
        "INDEX_TYPE",
        "indices",
        f"indices is {indices.dtype}; it must be torch.int32 or torch.int64",
    )
    _on_device("indices", indices, state)


def check_flags(state: torch.Tensor, indices: torch.Tensor, flags: torch.Tensor) -> None:
    """An integer or bool each, as many as indices, on the state's device."""
    numeric = flags.dtype.is_floating_point or flags.dtype.is_complex
    _require(not numeric, "FLAGS_MISMATCH", "flags", f"flags is {flags.dtype}; it must be of an integer or bool type")
    _require(
        flags.numel() == indices.shape[0],
        "FLAGS_MISMATCH",
        "flags",
        f"flags has {flags.numel()} elements; {indices.shape[0]} rows are selected",
    )
    _on_device("flags", flags, state)


def check_packed(shape: Sequence[int], state: torch.Tensor, packed: torch.Tensor) -> None:
    """Of that shape, on the state's device; of any type."""
    _require(
        packed.dim() == len(shape),
        "PACKED_MISMATCH",
        "packed",
        f"packed has {packed.dim()} axes; it must have {len(shape)}",
    )
    for axis, size in enumerate(shape):
        _require(
            packed.shape[axis] == size,
            "PACKED_MISMATCH",
            "packed",
            f"axis {axis} of packed has the size {packed.shape[axis]}; it must be {size}",
        )
    _on_device("packed", packed, state)


def check_selected(indices: torch.Tensor, max_selected: int) -> None:
    """No more than the plan allows."""
    selected = indices.shape[0]
    _require(
        selected <= max_selected,
        "SELECTED_TOO_LARGE",
        "indices",
        f"indices selects {selected} rows; the plan allows {max_selected}",
    )


def _on_device(name: str, tensor: torch.Tensor, state: torch.Tensor) -> None:
    _require(
        tensor.device == state.device,
        "DEVICE_NOT_VISIBLE",
        name,
        f"{name} is on {tensor.device}; the state is on {state.device}",
    )


def _require(holds: bool | torch.SymBool, code: str, about: str, message: str) -> None:
    """Raises ``ArgumentError`` unless it holds. What only a size at run time can tell is asserted there."""
    if isinstance(holds, torch.SymBool):
        torch._check(holds, lambda: f"{code}: {message}. {_REMEDIES[code]}")
    elif not holds:
        raise ArgumentError(message, code=code, remedy=_REMEDIES[code], about=about)
