"""Plans over torch tensors: a branch for tracing, then the extension's own call."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.compiler import is_compiling

from statecopy.errors import ArgumentError, HandleError, PlanError
from statecopy.torch.memory import dtype_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statecopy import _core

# A list of integers is INT64; it goes with the request, as the values of a device's tensor never do.
Indices: TypeAlias = "torch.Tensor | Sequence[int]"
Flags: TypeAlias = "torch.Tensor | Sequence[bool] | None"

_NOT_COMPILED = (
    "A binding set cannot be compiled. Call it outside of compiled code, or compile copies of single layers."
)


class Plan:
    """One published layer. The tensors of its copies may be any of the state's device.

    ``layer`` is the name under which compiled code finds it in the forward context; None for a plan that is for eager
    calls and graphs only.
    """

    def __init__(self, core: _core.Plan, state: torch.Tensor, layer: str | None) -> None:
        self._core = core
        self._gather = core.gather
        self._scatter = core.scatter
        self._submit_gather = core.submit_gather
        self._state: torch.Tensor | None = state
        self._retired = False
        self.layer = layer

    def gather(
        self,
        indices: Indices,
        flags: Flags = None,
        *,
        out: torch.Tensor | None = None,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """``packed[s] = state[indices[s]]`` where the index is valid and the flag is true; else zeros.

        ``indices`` is a vector of INT32 or INT64, ``flags`` has one element of an integer or bool type for each; either
        may be a list. Gives a tensor ``[selected, H, V, K]`` of its own, or ``out``. Raises ``statecopy.Error`` before
        anything moves, unless its ``leaves`` says otherwise.
        """
        if is_compiling():
            return self._traced_gather(indices, flags, (out, lane, timeout_s))
        packed: torch.Tensor
        if out is None and lane is None and timeout_s is None:
            # As layers call it: keywords cost as much as the look-up of an operand.
            packed = self._gather(indices, flags)
            return packed
        packed = self._gather(indices, flags, out=out, lane=lane, timeout_s=timeout_s)
        return packed

    def scatter(
        self,
        packed: torch.Tensor,
        indices: Indices,
        *,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """``state[indices[s]] = packed[s]`` where the index is valid. Valid indices must be unique.

        ``packed`` is ``[selected, H, V, K]``; it is made contiguous in the state's type where it is not.
        """
        if is_compiling():
            self._traced_scatter(packed, indices, (lane, timeout_s))
            return
        if lane is None and timeout_s is None:
            self._scatter(packed, indices)
            return
        self._scatter(packed, indices, lane=lane, timeout_s=timeout_s)

    def submit_gather(
        self,
        indices: Indices,
        flags: Flags = None,
        *,
        out: torch.Tensor | None = None,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> _core.Pending:
        """Submits a gather: a pending copy whose ``wait()``, or ``await``, gives what :meth:`gather` does."""
        if out is None and lane is None and timeout_s is None:
            return self._submit_gather(indices, flags)
        return self._core.submit_gather(indices, flags, out=out, lane=lane, timeout_s=timeout_s)

    def submit_scatter(
        self,
        packed: torch.Tensor,
        indices: Indices,
        *,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> _core.Pending:
        """Submits a scatter: a pending copy that is waited for by ``wait()`` or ``await``."""
        return self._core.submit_scatter(packed, indices, lane=lane, timeout_s=timeout_s)

    def _traced_gather(self, indices: Indices, flags: Flags, options: tuple[object, ...]) -> torch.Tensor:
        _no_options(options)
        gather = torch.ops.statecopy.kda_state_gather.default
        packed: torch.Tensor = gather(self.state, indices, flags, self.layer or "")
        return packed

    def _traced_scatter(self, packed: torch.Tensor, indices: Indices, options: tuple[object, ...]) -> None:
        _no_options(options)
        # The overload by its name: a graph knows of its schema that it mutates, and does not drop it as dead code.
        torch.ops.statecopy.kda_state_scatter.default(self.state, packed, indices, self.layer or "")

    def check_state(self, state: torch.Tensor) -> None:
        """Raises ``ArgumentError`` unless the tensor is the state that this plan copies, in memory, type and layout."""
        own = self.state
        if state is own:
            return
        for what, given, bound in (
            ("base", state.data_ptr(), own.data_ptr()),
            ("dtype", state.dtype, own.dtype),
            ("device", state.device, own.device),
            ("shape", tuple(state.shape), tuple(own.shape)),
            ("strides", state.stride(), own.stride()),
        ):
            if given != bound:
                raise ArgumentError(
                    f"The {what} of state is {given}; {self.name} was bound with {bound}",
                    code="SIGNATURE_MISMATCH",
                    remedy="Pass the tensor that is bound, or rebind the layer to the new one.",
                    about="state",
                )

    @property
    def state(self) -> torch.Tensor:
        """The tensor that is bound now."""
        if self._retired:
            raise PlanError(
                f"The registration that plan {self.name} came from was replaced or withdrawn",
                code="STALE_PLAN",
                remedy="Use the plans of the latest registration, or register again.",
                about=self.name,
            )
        if self._state is None:
            raise HandleError(
                f"The memory of {self.name} was released",
                code="REGION_UNKNOWN",
                remedy="Rebind the layer before the next copy.",
                about=self.name,
            )
        return self._state

    def _bind(self, state: torch.Tensor | None) -> None:
        self._state = state

    def _retire(self) -> None:
        """The daemon knows it no more: neither may a copy in this process."""
        self._state = None
        self._retired = True

    @property
    def name(self) -> str:
        """The name that it was registered under."""
        return self._core.name

    @property
    def dtype(self) -> torch.dtype:
        """The type of state and packed."""
        return dtype_of(self._core.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(N, H, V, K)``."""
        return self._core.shape

    @property
    def max_selected(self) -> int:
        """No request selects more rows."""
        return self._core.max_selected

    @property
    def payload_bytes(self) -> int:
        """Bytes of one state."""
        return self._core.payload_bytes

    @property
    def signature(self) -> str:
        """The hash of the layout signature."""
        return self._core.signature

    @property
    def kind(self) -> str | None:
        """The plan kind that the daemon chose: "fused" or "byte_copy"."""
        return self._core.kind

    def route(self, indices: Indices) -> _core.Route:
        """How indices would travel: ``how`` is in_place, inline or copied, ``address`` that of the request."""
        return self._core.route(indices)

    def __repr__(self) -> str:
        return f"<statecopy.torch.Plan {self.name} {self.dtype} {list(self.shape)}>"


class BindingSet:
    """Layers of one signature that are copied by one request. For eager calls and graphs: it cannot be compiled."""

    def __init__(self, core: _core.BindingSet, plans: tuple[Plan, ...]) -> None:
        self._core = core
        self._plans = plans

    def gather_all(
        self,
        indices: Indices,
        flags: Flags = None,
        *,
        out: torch.Tensor | None = None,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """A gather of every layer with the same indices and flags: ``[L, selected, H, V, K]``."""
        if is_compiling():
            raise RuntimeError(_NOT_COMPILED)
        packed: torch.Tensor = self._core.gather_all(indices, flags, out=out, lane=lane, timeout_s=timeout_s)
        return packed

    def scatter_all(
        self,
        packed: torch.Tensor,
        indices: Indices,
        *,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """A scatter into every layer, from ``[L, selected, H, V, K]``."""
        if is_compiling():
            raise RuntimeError(_NOT_COMPILED)
        self._core.scatter_all(packed, indices, lane=lane, timeout_s=timeout_s)

    def submit_gather_all(
        self,
        indices: Indices,
        flags: Flags = None,
        *,
        out: torch.Tensor | None = None,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> _core.Pending:
        """Submits a gather of every layer."""
        return self._core.submit_gather_all(indices, flags, out=out, lane=lane, timeout_s=timeout_s)

    def submit_scatter_all(
        self,
        packed: torch.Tensor,
        indices: Indices,
        *,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> _core.Pending:
        """Submits a scatter into every layer."""
        return self._core.submit_scatter_all(packed, indices, lane=lane, timeout_s=timeout_s)

    @property
    def name(self) -> str:
        """The name of the set."""
        return self._core.name

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of its layers, in the order of packed."""
        return self._plans

    @property
    def max_selected(self) -> int:
        """No request selects more rows."""
        return self._core.max_selected


def _no_options(options: tuple[object, ...]) -> None:
    """The operators have none of them."""
    if any(option is not None for option in options):
        # An exception of torch's tracer must be a plain one.
        raise RuntimeError("out, lane and timeout_s cannot be given in compiled code. Leave them out.")
