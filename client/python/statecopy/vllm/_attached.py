"""What a layer calls: its own plan, with the checks that prefill needs around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from statecopy.errors import ArgumentError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from statecopy.torch import Plan
    from statecopy.vllm._handle import StateCopy


class LayerStateCopy:
    """The copies of one layer, attached to it by :func:`~statecopy.vllm.initialize_state_copy`.

    It keeps its identity over sleep and wake, so that compiled code that met it stays valid. Calls come from the thread
    that runs the layer, as those of the layer itself.
    """

    __slots__ = ("_base", "_debug", "_skips_null_row", "layer_name", "owner", "plan")

    layer_name: str
    """The layer's name in the worker's forward context."""

    owner: StateCopy
    """What attached it."""

    plan: Plan | None
    """The layer's plan, where the operators of compiled code look for it; None while it is asleep or closed."""

    def __init__(self, owner: StateCopy, layer_name: str, *, skips_null_row: bool, debug: bool) -> None:
        self.owner = owner
        self.layer_name = layer_name
        self._skips_null_row = skips_null_row
        self._debug = debug
        self.fall_asleep()

    def wake(self, plan: Plan, state: torch.Tensor) -> None:
        """Binds it to a plan, and to the cache that this was registered for."""
        self.plan = plan
        self._base = state.data_ptr()

    def fall_asleep(self) -> None:
        """Lets go of the plan. Every call is refused until `wake`."""
        self.plan = None
        self._base = 0

    def gather(self, state: torch.Tensor, indices: torch.Tensor, flags: torch.Tensor | None) -> torch.Tensor:
        """The initial states `[selected, H, V, K]` of the rows that `indices` name, zero where the flag is false or the
        index is invalid (contract: Gather).

        ``state`` is the layer's bound cache; another one is refused. ``flags`` says which sequences have a state yet
        (``has_initial_state``) and is required: without it a new request would begin with what the row's last tenant
        left.
        """
        if flags is None:
            _refuse_without_flags(self.layer_name)
        indices = self._rows(indices)
        if torch.compiler.is_compiling():
            gather = torch.ops.statecopy.kda_state_gather.default
            packed: torch.Tensor = gather(state, indices, flags, self.layer_name)
            return packed
        return self._checked(state).gather(indices, flags)

    def scatter(self, state: torch.Tensor, packed: torch.Tensor, indices: torch.Tensor) -> None:
        """Writes the final states `packed` to the rows that `indices` name, skipping invalid ones (contract: Scatter).

        ``state`` is the layer's bound cache; another one is refused. ``packed`` may be of another dtype or not
        contiguous: it is brought into the cache's.
        """
        indices = self._rows(indices)
        if torch.compiler.is_compiling():
            # The overload by its name: a graph knows of its schema that it mutates, and does not drop it as dead code.
            torch.ops.statecopy.kda_state_scatter.default(state, packed, indices, self.layer_name)
            return
        self._checked(state).scatter(packed, indices)

    def __repr__(self) -> str:
        return f"<LayerStateCopy {self.layer_name}{'' if self.plan is None else ', ready'}>"

    def _checked(self, state: torch.Tensor) -> Plan:
        """The plan, once `state` is known to be the cache that it was registered for."""
        plan = self.plan
        if plan is None:
            raise PlanError(
                f"Layer {self.layer_name!r} has no state copy now: {self.owner.why_not_ready()}",
                remedy=self.owner.how_to_be_ready(),
                about=self.layer_name,
            )
        plan.check_state(state)
        # A tensor that was given other storage is the same object still.
        if state.data_ptr() != self._base:
            raise ArgumentError(
                f"state of layer {self.layer_name!r} begins at {state.data_ptr():#x}, and was bound at {self._base:#x}",
                code="SIGNATURE_MISMATCH",
                remedy="Call rebind() of the StateCopy after a cache was bound anew.",
                about="state",
            )
        return plan

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        if self._skips_null_row:
            # On the device: no value is read here.
            return torch.where(indices == 0, -1, indices)
        if self._debug and not _recorded(indices) and bool((indices == 0).any()):
            raise ArgumentError(
                f"indices of layer {self.layer_name!r} name row 0, the null block that pads a batch",
                remedy="Map padding to -1, or initialise with null_row='skip'.",
                about="indices",
            )
        return indices


def _without_flags(layer_name: str) -> None:
    raise ArgumentError(
        f"flags of layer {layer_name!r} are None: a new request would begin with what the last tenant of its row left",
        remedy="Pass has_initial_state, one flag for each selected row; all true where every row has a state.",
        about="flags",
    )


# While a model is traced too: the tracer calls it as it is, and cannot trace how the exception is made.
_refuse_without_flags: Callable[[str], None] = torch.compiler.assume_constant_result(_without_flags)


def _recorded(tensor: torch.Tensor) -> bool:
    """Whether the call is traced or captured: the values of its tensors are not known then."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
