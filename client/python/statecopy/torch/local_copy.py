"""The copies in this process, by torch: what a fallback does while the daemon is away.

The contract is the daemon's (contract: Gather, Scatter): bits are copied, an invalid index gives zeros or is skipped,
flags never suppress a final write. No value is read on the host where the tensors are on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from statecopy.errors import ArgumentError
from statecopy.torch.checks import check_flags, check_indices, check_packed, check_selected
from statecopy.torch.memory import bits


def operands(
    state: torch.Tensor, indices: torch.Tensor | Sequence[int], flags: torch.Tensor | Sequence[bool] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Indices and flags as tensors: the daemon takes lists too, of INT64 and of bools."""
    if not isinstance(indices, torch.Tensor):
        indices = _listed(indices, "indices", "INDEX_TYPE", torch.int64).to(state.device)
    if flags is not None and not isinstance(flags, torch.Tensor):
        flags = _listed(flags, "flags", "FLAGS_MISMATCH", torch.bool).to(state.device)
    return indices, flags


def _listed(values: Any, name: str, code: str, dtype: torch.dtype) -> torch.Tensor:
    """A list's values, which the daemon's path takes too: integers for indices, truths or integers for flags."""
    try:
        found = torch.tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _unlisted(name, code, str(error)) from error
    is_empty = found.numel() == 0
    allowed = (torch.int64,) if dtype == torch.int64 else (torch.int64, torch.bool)
    if not is_empty and found.dtype not in allowed:
        raise _unlisted(name, code, f"it holds {found.dtype}")
    return found.to(dtype)


def _unlisted(name: str, code: str, why: str) -> ArgumentError:
    wanted = "integers of 64 bits" if name == "indices" else "bools or integers"
    return ArgumentError(
        f"{name} is no list of {wanted}: {why}",
        code=code,
        remedy=f"Give a list of {wanted}, or a tensor.",
        about=name,
    )


def gather(
    states: Sequence[torch.Tensor], indices: torch.Tensor, flags: torch.Tensor | None, max_selected: int
) -> torch.Tensor:
    """``packed[l, s] = states[l][indices[s]]`` where the index is valid and the flag is true; else zeros."""
    first = states[0]
    check_indices(first, indices)
    check_selected(indices, max_selected)
    valid = _valid(first, indices)
    if flags is not None:
        check_flags(first, indices, flags)
        valid &= flags.reshape(-1).to(torch.bool)
    # An invalid index must not reach the copy; row 0 is always there.
    rows = torch.where(valid, indices, 0)
    absent = ~valid.view(-1, 1, 1, 1)
    packed = first.new_empty((len(states), indices.shape[0], *first.shape[1:]))
    for layer, state in enumerate(states):
        torch.index_select(bits(state), 0, rows, out=bits(packed[layer]))
    bits(packed).masked_fill_(absent, 0)
    return packed


def scatter(states: Sequence[torch.Tensor], packed: torch.Tensor, indices: torch.Tensor, max_selected: int) -> None:
    """``states[l][indices[s]] = packed[l, s]`` where the index is valid."""
    first = states[0]
    check_indices(first, indices)
    check_selected(indices, max_selected)
    check_packed((len(states), indices.shape[0], *first.shape[1:]), first, packed)
    if indices.shape[0] == 0:
        return
    check_apart(states, packed, "packed")
    packed = packed.detach().to(first.dtype).contiguous()
    (_scatter_blindly if first.is_cuda else _scatter_on_host)(states, packed, indices)


def _scatter_on_host(states: Sequence[torch.Tensor], packed: torch.Tensor, indices: torch.Tensor) -> None:
    valid = _valid(states[0], indices)
    rows, chosen = indices[valid].long(), bits(packed)[:, valid]
    for layer, state in enumerate(states):
        bits(state).index_copy_(0, rows, chosen[layer])


def _scatter_blindly(states: Sequence[torch.Tensor], packed: torch.Tensor, indices: torch.Tensor) -> None:
    """The same where no value may be read on the host, not even how many indices are valid.

    Each invalid one repeats a valid one: the same bytes to the same row. Where none is valid, row 0 is given its own.
    """
    valid = _valid(states[0], indices)
    donor = valid.to(torch.uint8).argmax().view(1)
    none = ~valid.any()
    rows = torch.where(valid, indices, torch.where(none, 0, indices.index_select(0, donor))).long()
    for layer, state in enumerate(states):
        cells, source = bits(state), bits(packed[layer])
        donated = torch.where(none, cells[:1], source.index_select(0, donor))
        cells.index_copy_(0, rows, torch.where(valid.view(-1, 1, 1, 1), source, donated))


def foreign(packed: Any, dtype: torch.dtype) -> torch.Tensor:
    """Packed of another library, as the daemon's path takes it too: of the state's type, which torch's own tensors are made."""
    if isinstance(packed, torch.Tensor):
        return packed
    try:
        found = from_dlpack(packed)
    except (TypeError, AttributeError, BufferError, RuntimeError) as error:
        raise ArgumentError(
            f"packed is a {type(packed).__name__}, which is no tensor: {error}",
            code="PACKED_MISMATCH",
            remedy="Give a tensor that has DLPack.",
            about="packed",
        ) from error
    if found.dtype != dtype:
        raise ArgumentError(
            f"packed is {found.dtype}; the state is {dtype}",
            code="PACKED_MISMATCH",
            remedy="Give packed in the type of the state.",
            about="packed",
        )
    return found


def check_apart(states: Sequence[torch.Tensor], tensor: torch.Tensor, name: str) -> None:
    """Raises ``ArgumentError`` where a tensor lies in a payload of a state (contract: Both). Reads addresses alone.

    One that has to be converted first never reaches the copy itself.
    """
    if not tensor.is_contiguous() or tensor.dtype != states[0].dtype:
        return
    size = tensor.element_size()
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * size
    for state in states:
        base, page = state.data_ptr(), state.stride(0) * size
        payload = state[0].numel() * size
        first = max((start - base - payload) // page + 1, 0)
        inside = start < end and first < state.shape[0] and base + first * page < end
        if inside:
            raise ArgumentError(
                f"{name} lies in the payload of row {first} of the state",
                code="OVERLAP",
                remedy="Use memory that no cache payload touches.",
                about=name,
            )


def check_unique(state: torch.Tensor, indices: torch.Tensor) -> None:
    """Raises ``ArgumentError`` where a valid destination is named twice. It reads the indices on the host."""
    check_indices(state, indices)
    rows, times = indices[_valid(state, indices)].unique(return_counts=True)
    repeated = rows[times > 1].tolist()
    if repeated:
        raise ArgumentError(
            f"indices names the row {repeated[0]} more than once; the destinations of a scatter are unique",
            code="ROW_INVALID",
            remedy="Scatter each row once.",
            about="indices",
        )


def finish(packed: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The result, in the caller's tensor where one was given."""
    if out is None:
        return packed
    if out.shape != packed.shape or out.dtype != packed.dtype:
        raise ArgumentError(
            f"out is {out.dtype} {tuple(out.shape)}; the copy gives {packed.dtype} {tuple(packed.shape)}",
            code="PACKED_MISMATCH",
            remedy="Give a tensor of that type and shape.",
            about="out",
        )
    bits(out).copy_(bits(packed))
    return out


def _valid(state: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return (indices >= 0) & (indices < state.shape[0])
