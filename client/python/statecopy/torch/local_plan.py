"""Plans of a client that copies in this process while its daemon is away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.compiler import is_compiling

from statecopy.torch import local_copy
from statecopy.torch.plan import BindingSet, Flags, Indices, Plan

if TYPE_CHECKING:
    from statecopy import _core
    from statecopy.torch.fallback import Fallback


class LocalPlan(Plan):
    """A plan with a fallback. Its asynchronous forms have none: they raise while the daemon is away."""

    def __init__(
        self, core: _core.Plan, state: torch.Tensor, layer: str | None, fallback: Fallback, *, check_unique: bool
    ) -> None:
        super().__init__(core, state, layer)
        self._fallback = fallback
        self._check_unique = check_unique

    def gather(
        self,
        indices: Indices,
        flags: Flags = None,
        *,
        out: torch.Tensor | None = None,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """As :meth:`Plan.gather`, by the daemon or in this process."""
        if is_compiling():
            return self._traced_gather(indices, flags, (out, lane, timeout_s))

        def ask() -> torch.Tensor:
            packed: torch.Tensor = self._gather(indices, flags, out=out, lane=lane, timeout_s=timeout_s)
            return packed

        def copy() -> torch.Tensor:
            rows, truths = local_copy.operands(self.state, indices, flags)
            if out is not None:
                local_copy.check_apart([self.state], out, "out")
            return local_copy.finish(local_copy.gather([self.state], rows, truths, self.max_selected)[0], out)

        return self._fallback.run("local_gathers", ask, copy)

    def scatter(
        self,
        packed: torch.Tensor,
        indices: Indices,
        *,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """As :meth:`Plan.scatter`, by the daemon or in this process."""
        if is_compiling():
            self._traced_scatter(packed, indices, (lane, timeout_s))
            return

        def ask() -> None:
            self._scatter(packed, indices, lane=lane, timeout_s=timeout_s)

        def copy() -> None:
            rows, _ = local_copy.operands(self.state, indices, None)
            if self._check_unique:
                local_copy.check_unique(self.state, rows)
            local_copy.scatter(
                [self.state], local_copy.foreign(packed, self.state.dtype).unsqueeze(0), rows, self.max_selected
            )

        self._fallback.run("local_scatters", ask, copy)


class LocalBindingSet(BindingSet):
    """A binding set with a fallback. Its asynchronous forms have none."""

    def __init__(
        self, core: _core.BindingSet, plans: tuple[Plan, ...], fallback: Fallback, *, check_unique: bool
    ) -> None:
        super().__init__(core, plans)
        self._fallback = fallback
        self._check_unique = check_unique

    def gather_all(
        self,
        indices: Indices,
        flags: Flags = None,
        *,
        out: torch.Tensor | None = None,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """As :meth:`BindingSet.gather_all`, by the daemon or in this process."""
        of_daemon = super().gather_all

        def ask() -> torch.Tensor:
            return of_daemon(indices, flags, out=out, lane=lane, timeout_s=timeout_s)

        def copy() -> torch.Tensor:
            states = [plan.state for plan in self.plans]
            rows, truths = local_copy.operands(states[0], indices, flags)
            if out is not None:
                local_copy.check_apart(states, out, "out")
            return local_copy.finish(local_copy.gather(states, rows, truths, self.max_selected), out)

        return self._fallback.run("local_gathers", ask, copy)

    def scatter_all(
        self,
        packed: torch.Tensor,
        indices: Indices,
        *,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """As :meth:`BindingSet.scatter_all`, by the daemon or in this process."""
        of_daemon = super().scatter_all

        def ask() -> None:
            of_daemon(packed, indices, lane=lane, timeout_s=timeout_s)

        def copy() -> None:
            states = [plan.state for plan in self.plans]
            rows, _ = local_copy.operands(states[0], indices, None)
            if self._check_unique:
                local_copy.check_unique(states[0], rows)
            local_copy.scatter(states, local_copy.foreign(packed, states[0].dtype), rows, self.max_selected)

        self._fallback.run("local_scatters", ask, copy)
