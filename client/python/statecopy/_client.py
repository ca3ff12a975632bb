"""The client over any library's tensors, and what it has in common with the one over torch's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from statecopy import _core

PlanT = TypeVar("PlanT")
SetT = TypeVar("SetT")


class Plans(Mapping[str, PlanT], Generic[PlanT, SetT]):
    """The plans of one registration, by the names that were registered; ``sets`` has its binding sets."""

    sets: Mapping[str, SetT]

    def __init__(self, plans: dict[str, PlanT], sets: dict[str, SetT]) -> None:
        self._plans = plans
        self.sets = sets

    def __getitem__(self, name: str) -> PlanT:
        return self._plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    def __repr__(self) -> str:
        return f"Plans({list(self._plans)}, sets={list(self.sets)})"


def set_members(sets: Mapping[str, Sequence[str]] | None) -> dict[str, list[str]]:
    """The layers of each binding set, of an argument of that name. A lone name is no list of names."""
    if sets is None:
        return {}
    if not isinstance(sets, Mapping):
        raise TypeError(f"sets: a mapping of names to lists of layers is needed, not {type(sets).__name__}")
    found = {}
    for name, members in sets.items():
        if isinstance(members, str) or not isinstance(members, Iterable):
            raise TypeError(f"sets: {name!r} needs a list of layers, not {type(members).__name__}")
        found[name] = list(members)
        if not all(isinstance(member, str) for member in found[name]):
            raise TypeError(f"sets: {name!r} needs a list of layers' names, not {members!r}")
    return found


SessionT = TypeVar("SessionT", bound="Session")


class Session:
    """A worker's session with the daemon, whatever its tensors. Several in one process know nothing of each other."""

    def __init__(self, core: _core.Client) -> None:
        self._core = core

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

    def check(self) -> None:
        """Raises what became of copies that were put on streams and were not made; returns at once where all is well.

        For the end of each step. It asks nobody. Copies whose calls return when the bytes are there have nothing to check.
        """
        self._core.check()

    def reset_lanes(self) -> None:
        """Lets streams that lost a copy begin anew, once the rows that it was to write are written again or given up."""
        self._core.reset_lanes()

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

    def __enter__(self: SessionT) -> SessionT:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class Client(Session):
    """A client over the tensors of any library. Made by :func:`statecopy.connect`."""

    def register(
        self,
        tensors: Mapping[str, Any],
        *,
        max_selected: int,
        sets: Mapping[str, Sequence[str]] | None = None,
        check_unique: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Plans[_core.Plan, _core.BindingSet]:
        """Publishes layers, all or none, and replaces what this client had published.

        ``tensors`` maps names to state caches ``[N, H, V, K]`` in memory that can be shared; their tensors are kept until the
        next registration, :meth:`release` or :meth:`close`. No request may select more than ``max_selected`` rows. ``sets``
        names groups of layers of one layout that one request copies. ``check_unique`` refuses a scatter whose destinations
        repeat: for debugging. ``progress(stage, done, total)`` hears how far it is.

        Raises ``statecopy.Error``, which names the layer; then nothing is published. What the daemon refuses withdraws the
        plans of before, too; an argument that this side refuses leaves them.
        """
        by_name = set_members(sets)
        plans, of_sets = self._core._register(tensors, max_selected, by_name, check_unique, progress)
        return Plans(plans, of_sets)

    def rebind(self, tensors: Mapping[str, Any]) -> None:
        """Moves published layers to other memory of the same layout, without preparing again. Their plans go on."""
        self._core.rebind(tensors)


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
