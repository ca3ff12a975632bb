"""What the extension asks torch for: results as tensors, operands in the form that a request takes, streams."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from statecopy.errors import ArgumentError
from statecopy.torch.memory import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable

# An operand in shared memory begins at a multiple of it (contract: Both).
ALIGNMENT = 16
FLAG_TYPES = (torch.bool, torch.uint8, torch.int8)


def _current_raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_raw_stream)


class Hooks:
    """The hooks of one client. ``index`` is the session's device among this process's CUDA devices, once known."""

    # Called for each copy: the raw handle of the current stream on the session's device.
    stream: Callable[[], int]

    def __init__(self, index: int | None) -> None:
        self.bind(index)

    def bind(self, index: int | None) -> None:
        """Names the device."""
        self.index = index
        self.stream = self._stream_of_current_device if index is None else partial(_raw_stream, index)

    # Called for each gather: torch's own function, with nothing around it.
    wrap: Callable[[Any], torch.Tensor] = staticmethod(torch._C._from_dlpack)

    def view(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        """The same bytes as elements of another type: DLPack does not carry all of torch's."""
        return tensor.view(dtype_of(dtype))

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device() if self.index is None else self.index)

    @staticmethod
    def _stream_of_current_device() -> int:
        return _raw_stream(torch.cuda.current_device())

    def normalise(self, role: str, tensor: torch.Tensor, dtype: str | torch.dtype | None = None) -> torch.Tensor:
        """An operand that cannot be used as it is, as one that can, on its own device. No value is read here."""
        tensor = tensor.detach()
        if role == "flags":
            return _aligned(_bytes(tensor))
        if role == "indices":
            return _aligned(tensor)
        if role == "packed" and dtype is not None:
            return _aligned(tensor.to(dtype_of(dtype)))
        raise ArgumentError(f"The role is {role!r}; operands are indices, flags or packed", about="role")

    def maker(self, dtype: str) -> Callable[[tuple[int, ...]], torch.Tensor]:
        """What makes the tensors that gathers give, in the order of the current stream: of a shape, on the session's device."""
        # Called for each gather: a method of a tensor takes half the time of torch.empty with a type and a device to look at.
        return torch.empty(0, dtype=dtype_of(dtype), device=self._device()).new_empty

    def upload(self, role: str, values: list[int] | list[bool]) -> torch.Tensor:
        """Values of the host on the session's device, in the order of the current stream, which is not waited for."""
        # Pinned: torch keeps it until the stream has read it.
        pinned = torch.tensor(values, dtype=torch.bool if role == "flags" else torch.int64, pin_memory=True)
        return pinned.to(self._device(), non_blocking=True)

    def stage(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copies an operand into shared memory, on the current stream."""
        into.copy_(tensor.detach().view(into.shape))


def _bytes(flags: torch.Tensor) -> torch.Tensor:
    """A vector of one byte a flag: zero is false, every other value true."""
    flat = flags.reshape(-1)
    if flat.dtype in FLAG_TYPES:
        return flat
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        raise ArgumentError(
            f"flags is {flags.dtype}; it must be of an integer or bool type",
            code="FLAGS_MISMATCH",
            remedy="Give one flag of an integer or bool type for each index.",
            about="flags",
        )
    return flat.to(torch.bool)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)
