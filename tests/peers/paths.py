"""Who makes the copies: torch, a Triton kernel in this process, and the daemon; all on the same tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MEANINGS = {
    "daemon": "statecopy.torch, host-completed: plan.gather, plan.scatter",
    "control": "daemon measured a second time under another label",
    "daemon_preallocated": "daemon into packed memory taken before the interval",
    "ordered": "plan.gather, plan.scatter in the order of the current stream, and torch.cuda.synchronize",
    "ordered_control": "ordered measured a second time under another label",
    "ordered_preallocated": "ordered into packed memory taken before the interval",
    "daemon_copied": "scatter by the daemon of states in memory that it cannot share: they are copied once more",
    "torch_index": "state[rows], masked by flags; state[rows] = packed",
    "index_select": "torch.index_select(out=) into memory allocated in the interval, masked by flags; state.index_copy_",
    "index_select_preallocated": "the same into memory allocated before the interval",
    "triton": "a Triton kernel by its compiled launcher, bound to its grid before, and torch.cuda.synchronize",
    "triton_preallocated": "the same into packed memory taken before the interval",
    "triton_jit": "the same by the kernel's usual entry",
}
HOST_DAEMON = ("daemon", "control", "daemon_preallocated", "daemon_copied")
GPU_ONLY = ("triton", "triton_preallocated", "triton_jit", "ordered", "ordered_control", "ordered_preallocated")


@dataclass
class Inputs:
    """What a call is given, the same for every path. Torch takes its indices as INT64, which is its fastest."""

    rows: torch.Tensor
    rows64: torch.Tensor
    flags: torch.Tensor
    # Final states to scatter, or a buffer for the paths that are given one.
    packed: torch.Tensor
    # The same states in memory of torch's own.
    private: torch.Tensor


Call = Callable[[Inputs], Any]


def is_daemon(path: str) -> bool:
    """Whether the daemon makes the copy: its call returns when it is done."""
    return path in HOST_DAEMON


class Peers:
    """The paths of one operation over one state."""

    def __init__(self, plan: Any, ordered: Any, state: torch.Tensor, operation: str, selected: int) -> None:
        self.plan, self.ordered, self.state, self.selected = plan, ordered, state, selected
        self.shape = (selected, *state.shape[1:])
        on_gpu = state.is_cuda
        if operation == "scatter":
            self.calls: dict[str, Call] = {
                "daemon": self._daemon_scatter,
                "control": self._daemon_scatter,
                "torch_index": self._torch_scatter,
                "index_select": self._index_copy,
            }
            if not on_gpu:
                self.calls["daemon_copied"] = lambda given: self.plan.scatter(given.private, given.rows)
        else:
            self.calls = {
                "daemon": self._daemon_gather,
                "control": self._daemon_gather,
                "daemon_preallocated": lambda given: self.plan.gather(given.rows, given.flags, out=given.packed),
                "torch_index": lambda given: self._mask(self.state[given.rows64], given),
                "index_select": self._index_select,
                "index_select_preallocated": lambda given: self._index_select(given, given.packed),
            }
        self.submits: dict[str, Call] = {
            "daemon": lambda given: self.plan.submit_gather(given.rows, given.flags),
            "daemon_preallocated": lambda given: self.plan.submit_gather(given.rows, given.flags, out=given.packed),
        }
        if operation == "scatter":
            self.submits = {"daemon": lambda given: self.plan.submit_scatter(given.packed, given.rows)}
        self.submits["control"] = self.submits["daemon"]
        if on_gpu:
            self._add_ordered(operation)
            self._add_triton(operation)

    def _daemon_gather(self, given: Inputs) -> Any:
        return self.plan.gather(given.rows, given.flags)

    def _daemon_scatter(self, given: Inputs) -> Any:
        return self.plan.scatter(given.packed, given.rows)

    def _add_ordered(self, operation: str) -> None:
        plan = self.ordered
        if operation == "scatter":
            self.calls["ordered"] = lambda given: plan.scatter(given.packed, given.rows)
        else:
            self.calls["ordered"] = lambda given: plan.gather(given.rows, given.flags)
            self.calls["ordered_preallocated"] = lambda given: plan.gather(given.rows, given.flags, out=given.packed)
        self.calls["ordered_control"] = self.calls["ordered"]

    def _mask(self, packed: torch.Tensor, given: Inputs) -> torch.Tensor:
        # Each device its faster way: on a GPU the first one would wait for the flags.
        if packed.is_cuda:
            return packed.masked_fill_(~given.flags.view(-1, 1, 1, 1), 0)
        packed[~given.flags] = 0
        return packed

    def _index_select(self, given: Inputs, packed: torch.Tensor | None = None) -> torch.Tensor:
        if packed is None:
            packed = torch.empty(self.shape, dtype=self.state.dtype, device=self.state.device)
        torch.index_select(self.state, 0, given.rows64, out=packed)
        return self._mask(packed, given)

    def _torch_scatter(self, given: Inputs) -> None:
        self.state[given.rows64] = given.packed

    def _index_copy(self, given: Inputs) -> None:
        self.state.index_copy_(0, given.rows64, given.packed)

    def _add_triton(self, operation: str) -> None:
        rival = triton_rival()
        kernel = rival.scatter if operation == "scatter" else rival.gather
        payload = self.state[0].numel()
        grid = (-(-payload // rival.BLOCK), self.selected, 1)
        tail = (self.state.shape[0], self.state.stride(0), payload, True, rival.BLOCK)

        def arguments(given: Inputs, packed: torch.Tensor) -> tuple[Any, ...]:
            return self.state, packed, given.rows, given.flags.view(torch.uint8), *tail

        device = self.state.device
        none = Inputs(
            rows=torch.full((self.selected,), -1, dtype=torch.int32, device=device),
            rows64=torch.full((self.selected,), -1, device=device),
            flags=torch.zeros(self.selected, dtype=torch.bool, device=device),
            packed=torch.empty(self.shape, dtype=self.state.dtype, device=device),
            private=torch.empty(0),
        )
        # Compiled on rows that do not exist: nothing of the state changes.
        launcher = kernel[grid](*arguments(none, none.packed), num_warps=rival.WARPS)[grid]

        def output(given: Inputs) -> torch.Tensor:
            if operation == "scatter":
                return given.packed
            return torch.empty(self.shape, dtype=self.state.dtype, device=device)

        def launched(given: Inputs) -> torch.Tensor:
            packed = output(given)
            launcher(*arguments(given, packed))
            return packed

        def preallocated(given: Inputs) -> torch.Tensor:
            launcher(*arguments(given, given.packed))
            return given.packed

        def jit(given: Inputs) -> torch.Tensor:
            packed = output(given)
            kernel[grid](*arguments(given, packed), num_warps=rival.WARPS)
            return packed

        self.calls["triton"], self.calls["triton_jit"] = launched, jit
        if operation != "scatter":
            self.calls["triton_preallocated"] = preallocated


def triton_rival() -> Any:
    """The kernels of `statecopy bench`'s rival: beside this folder, or in this one where a device machine got both."""
    here = Path(__file__).resolve().parent
    for folder in (here.parent / "device", here):
        if (folder / "triton_rival.py").exists():
            sys.path.insert(0, str(folder))
            break
    import triton_rival as found

    return found
