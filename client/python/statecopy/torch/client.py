"""A worker's client over torch tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

import statecopy
from statecopy import _core
from statecopy._client import Session, set_members
from statecopy.errors import ArgumentError
from statecopy.torch import device as devices
from statecopy.torch.fallback import Fallback
from statecopy.torch.hooks import Hooks
from statecopy.torch.local_plan import LocalBindingSet, LocalPlan
from statecopy.torch.operators import define
from statecopy.torch.plan import BindingSet, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

OnUnavailable = Literal["raise", "local"]
Completion = Literal["stream", "host"]


def connect(
    address: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str | int | None = None,
    on_unavailable: OnUnavailable = "raise",
    debug: bool = False,
    timeout_s: float = 10.0,
    completion: Completion = "stream",
    **options: Any,
) -> Client:
    """Opens a session with the daemon at ``address``, or at STATECOPY_ADDR, for the device of the worker's tensors.

    ``device`` is torch's name of it (``"cuda:0"``), its index among this process's CUDA devices, or a UUID; None for
    the daemon's only device. ``on_unavailable="local"`` copies in this process while the daemon is away, loud in the
    log and in :meth:`Client.counters`; the daemon must be there to connect and to register. ``debug`` has repeated
    destinations of a scatter refused (ROW_INVALID), at the price of a check in each request. ``completion="stream"`` puts
    copies of a GPU on the current stream, as its kernels: the call returns before they are made, and what follows on the stream
    finds the bytes; call :meth:`Client.check` once a step. ``"host"`` returns when the bytes are there, as copies on the host and
    over gRPC always do. ``options`` are those of ``statecopy.connect``.

    Raises ``statecopy.Unavailable`` when there is no daemon in time, and the daemon's refusals.
    """
    if on_unavailable not in ("raise", "local"):
        raise ArgumentError(
            f"on_unavailable is {on_unavailable!r}; it must be 'raise' or 'local'",
            remedy="Choose one of the two.",
            about="on_unavailable",
        )
    uuid, index = devices.find(device)
    hooks = Hooks(index)
    if on_unavailable == "local":
        # An absent daemon is asked for once, not for as long as a call may take.
        options.setdefault("reconnect_s", 0.0)
    where = None if address is None else os.fspath(address)
    core = _core.connect(where, device=uuid, timeout_s=timeout_s, hooks=hooks, completion=completion, **options)
    fallback = Fallback(core, timeout_s) if on_unavailable == "local" else None
    return Client(core, hooks, fallback, debug=debug)


Plans = statecopy.Plans[Plan, BindingSet]


class Client(Session):
    """A client over torch tensors. Made by :func:`connect`."""

    def __init__(self, core: _core.Client, hooks: Hooks, fallback: Fallback | None, *, debug: bool) -> None:
        super().__init__(core)
        self._hooks = hooks
        self._fallback = fallback
        self._plans: dict[str, Plan] = {}
        self.debug = debug

    def register(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        max_selected: int,
        sets: Mapping[str, Sequence[str]] | None = None,
        check_unique: bool | None = None,
        layers: bool = True,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Plans:
        """Prepares, seals and publishes the states ``[N, H, V, K]``, all or none, in place of those of before.

        The tensors are kept until the next registration, :meth:`release` or :meth:`close`. ``sets`` names layers of one
        signature that are copied by one request. ``check_unique`` is the client's ``debug`` where it is None.
        ``layers=False`` gives plans for eager calls and graphs, whose names are not layers of a forward context:
        compiling them raises. ``progress(stage, done, total)`` hears how far it is.

        Raises ``statecopy.Error``, which names the layer; then nothing is published. What the daemon refuses withdraws the
        plans of before, too; an argument that this side refuses leaves them.
        """
        states, of_sets = dict(tensors), set_members(sets)
        index = devices.of_states(states)
        if index is not None:
            self._hooks.bind(index)
        unique = self.debug if check_unique is None else check_unique
        # As late as can be, so that a model's own definition of the names comes first.
        define("vllm")
        try:
            found, found_sets = self._core._register(states, max_selected, of_sets, unique, progress)
        except BaseException:
            # A refusal withdraws what was published; a failure before it leaves it as it is.
            if not self._core._has_layers():
                self._retire()
            raise
        self._retire()
        fallback = self._fallback
        if fallback is not None:
            fallback.answered()
        plans: dict[str, Plan] = {}
        for name, state in states.items():
            layer = name if layers else None
            core = found[name]
            plans[name] = (
                Plan(core, state, layer)
                if fallback is None
                else LocalPlan(core, state, layer, fallback, check_unique=unique)
            )
        made: dict[str, BindingSet] = {}
        for name, members in of_sets.items():
            of = tuple(plans[member] for member in members)
            of_daemon = found_sets[name]
            made[name] = (
                BindingSet(of_daemon, of)
                if fallback is None
                else LocalBindingSet(of_daemon, of, fallback, check_unique=unique)
            )
        self._plans = plans
        return statecopy.Plans(plans, made)

    def _retire(self) -> None:
        for plan in self._plans.values():
            plan._retire()
        self._plans = {}

    def rebind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Moves published layers to other tensors of the same signature, without preparing again. Their plans go on.

        Raises ``statecopy.PlanError`` for another signature; then no layer has moved.
        """
        states = dict(tensors)
        devices.of_states(states)
        self._core.rebind(states)
        for name, state in states.items():
            self._plans[name]._bind(state)
        if self._fallback is not None:
            self._fallback.answered()

    def release(self) -> None:
        """Gives the memory of the published layers back, before the worker sleeps. :meth:`rebind` wakes them."""
        super().release()
        for plan in self._plans.values():
            plan._bind(None)

    def counters(self) -> dict[str, int]:
        """What this client did and holds, in numbers.

        ``local_gathers``, ``local_scatters`` and ``outages`` are those of its fallback.
        """
        local = {"local_gathers": 0, "local_scatters": 0, "outages": 0}
        return {**super().counters(), **(local if self._fallback is None else self._fallback.counters())}

    def close(self) -> None:
        """Ends the session and gives back everything that it owned."""
        super().close()
        for plan in self._plans.values():
            plan._bind(None)
