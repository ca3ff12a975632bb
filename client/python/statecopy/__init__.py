"""statecopy: gather and scatter of recurrent states by a daemon that owns the kernels.

A worker shares memory with the daemon, registers the layers whose state caches lie in it, and asks for copies::

    import numpy, statecopy

    cache = statecopy.empty((32, 4, 128, 128), "float32")
    with statecopy.connect() as client:
        plan = client.register({"layers.0": cache}, max_selected=8)["layers.0"]
        packed = plan.gather([3, 1, -1])
        states = numpy.asarray(packed)          # [3, 4, 128, 128]; row -1 is all zero
        plan.scatter(packed, [3, 1, -1])

Tensors come in by DLPack or the buffer protocol: NumPy, torch, and whatever else speaks either. ``statecopy.torch`` is the
same for torch tensors, ``statecopy.vllm`` the glue for serving engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from statecopy import _core
from statecopy._core import BindingSet, Pending, Plan, Route, Tensor, __version__, empty
from statecopy.errors import (
    ArgumentError,
    CapacityError,
    ClosedError,
    DeadlineExceeded,
    DeviceLost,
    Error,
    ForkedError,
    HandleError,
    PlanError,
    SessionError,
    Unavailable,
)

__all__ = [
    "ArgumentError",
    "BindingSet",
    "CapacityError",
    "Client",
    "ClosedError",
    "DeadlineExceeded",
    "DeviceLost",
    "Error",
    "ForkedError",
    "HandleError",
    "Pending",
    "Plan",
    "PlanError",
    "Plans",
    "Route",
    "SessionError",
    "Tensor",
    "Unavailable",
    "__version__",
    "connect",
    "empty",
]

# A forked child's copy of a client is closed: the extension is told of the fork before any other code runs in the child.
os.register_at_fork(after_in_child=_core._forked)


class Plans(Mapping[str, Plan]):
    """The plans of one registration, by the names that were registered; ``sets`` has its binding sets."""

    sets: Mapping[str, BindingSet]

    def __init__(self, plans: dict[str, Plan], sets: dict[str, BindingSet]) -> None:
        self._plans = plans
        self.sets = sets

    def __getitem__(self, name: str) -> Plan:
        return self._plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    def __repr__(self) -> str:
        return f"Plans({list(self._plans)}, sets={list(self.sets)})"


class Client:
    """A worker's session with the daemon. Made by :func:`connect`; several in one process know nothing of each other."""

    def __init__(self, core: _core.Client) -> None:
        self._core = core

    def register(
        self,
        layers: Mapping[str, Any],
        *,
        max_selected: int,
        sets: Mapping[str, Sequence[str]] | None = None,
        check_unique: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Plans:
        """Publishes layers, all or none, and replaces what this client had published.

        ``layers`` maps names to state caches ``[N, H, V, K]`` in memory that can be shared; their tensors are kept until the
        next registration, :meth:`release` or :meth:`close`. No request may select more than ``max_selected`` rows. ``sets``
        names groups of layers of one layout that one request copies. ``check_unique`` refuses a scatter whose destinations
        repeat: for debugging. ``progress(stage, done, total)`` hears how far it is.
        """
        by_name = {name: list(of) for name, of in (sets or {}).items()}
        plans, of_sets = self._core._register(layers, max_selected, by_name, check_unique, progress)
        return Plans(plans, of_sets)

    def rebind(self, layers: Mapping[str, Any]) -> None:
        """Moves published layers to other memory of the same layout, without preparing again. Their plans go on."""
        self._core.rebind(layers)

    def release(self) -> None:
        """Gives up the memory of every published layer, and free buffers: before an engine sleeps.

        The layers keep their plans, which answer REGION_UNKNOWN until :meth:`rebind` wakes them.
        """
        self._core.release()

    def trim(self) -> int:
        """Gives up shared regions and pooled buffers that nothing uses. Returns how many bytes they had."""
        return self._core.trim()

    def freeze(self) -> None:
        """From now on memory that is new to the client is copied into a pooled buffer instead of being registered."""
        self._core.freeze()

    def counters(self) -> dict[str, int]:
        """What this client did and holds, in numbers."""
        return self._core.counters()

    def has_stray_copies(self) -> bool:
        """Whether a copy that nobody waits for may still run, so that rows and packed buffers may yet change."""
        return self._core.has_stray_copies()

    def ping(self) -> None:
        """Returns once the daemon has answered."""
        self._core.ping()

    def info(self) -> dict[str, Any] | None:
        """What was agreed on with the daemon; None while there is no session."""
        return self._core.info()

    def inspect(self) -> dict[str, Any]:
        """Everything that the daemon serves, as ``statecopy status --json`` prints it."""
        return self._core.inspect()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the parent of this process."""
        return self._core.closed

    def close(self) -> None:
        """Ends the session and gives back everything that it owned. A second time does nothing."""
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


def connect(
    address: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    label: str = "",
    wait_s: float = 5.0,
    timeout_s: float = 10.0,
    register_timeout_s: float = 120.0,
    reconnect_s: float | None = None,
    transport: str = "ring",
    spin_us: float = 50.0,
    pool_bytes_max: int | None = None,
) -> Client:
    """Connects to the daemon at ``address``, or where ``STATECOPY_ADDR`` says.

    An address is ``unix:///path/of/the/socket``, the socket's path, or the daemon's runtime directory. A daemon that is not
    there yet is waited for, ``wait_s`` seconds at most. ``device`` is the UUID of the device that the worker's memory lies
    on, where the daemon serves several. ``timeout_s`` is the deadline of calls and copies that name none;
    a call looks for a daemon that went away until its own deadline, or ``reconnect_s`` seconds at most. ``transport`` is
    ``"ring"`` or ``"grpc"``. ``spin_us`` is how long a call looks for its answer before it sleeps. The client's buffers take
    at most ``pool_bytes_max`` bytes.
    """
    core = _core.connect(
        None if address is None else os.fspath(address),
        device=device,
        label=label,
        wait_s=wait_s,
        timeout_s=timeout_s,
        register_timeout_s=register_timeout_s,
        reconnect_s=reconnect_s,
        transport=transport,
        spin_us=spin_us,
        pool_bytes_max=pool_bytes_max,
    )
    return Client(core)
