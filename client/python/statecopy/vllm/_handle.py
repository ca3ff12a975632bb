"""The worker's life: initialise, release before sleep, rebind after wake, close."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, get_args

import statecopy.torch
from statecopy.errors import ArgumentError, ClosedError, Error
from statecopy.vllm._attached import LayerStateCopy
from statecopy.vllm._layers import PLAN_ATTRIBUTE, Layer, Predicate, find, first_of_each_cache, is_same_cache

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from statecopy.torch import Client, Plan

NullRow = Literal["as_is", "skip"]

_log = logging.getLogger(__name__)


class _State(Enum):
    """
    - ASLEEP -> READY: every layer is registered, attached and published; again by `rebind`.
    - READY -> ASLEEP: `release`, or a `rebind` that fails. The layers keep what is attached; it refuses.
    - any -> CLOSED: `close`, a failed initialisation, or the next one.
    """

    READY = "it is ready"
    ASLEEP = "it was released for sleep"
    CLOSED = "it was closed, or replaced by a later initialisation"


class StateCopy:
    """The state copies of one worker, as :func:`initialize_state_copy` returns them. A context manager that closes."""

    def __init__(self, layers: list[Layer], client: Client | None, *, owns_client: bool) -> None:
        self._layers = layers
        self._client = client
        self._owns_client = owns_client
        self._plans: Mapping[str, Plan] = {}
        # By layer, the first layer with the same cache: it is registered for all of them.
        self._registered_as: dict[str, str] = {}
        self._copies: dict[str, LayerStateCopy] = {}
        self._state = _State.ASLEEP

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that take part, in the order of the forward context. May be empty."""
        return tuple(layer.name for layer in self._layers)

    @property
    def client(self) -> Client | None:
        """The client that holds the registration; None where no layer takes part."""
        return self._client

    @property
    def ready(self) -> bool:
        """Whether the layers may copy now."""
        return self._state is _State.READY

    def check(self) -> None:
        """Raises what became of copies that were put on a GPU's stream and were not made. For the end of each step; asks nobody."""
        if self._client is not None and self._state is not _State.CLOSED:
            self._client.check()

    def release(self) -> None:
        """Before sleep: withdraws every layer and gives the caches back, so that freeing them frees memory.

        Afterwards a copy raises until `rebind`.
        """
        self._refuse_when_closed("release")
        self._withdraw()
        if self._client is not None:
            self._client.release()
            # The buffers of packed states that nobody holds.
            self._client.trim()

    def rebind(self) -> None:
        """After wake: reads the layers' caches anew and binds the plans to them, without preparing anything again.

        All or none. A cache must have the signature (device, dtype, shape, strides, base address mod 16) that was
        registered; after a refusal every layer stays withdrawn, and `rebind` may be called again.
        """
        self._refuse_when_closed("rebind")
        self._withdraw()
        states = {layer.name: layer.state() for layer in self._layers}
        for name, first in self._registered_as.items():
            if not is_same_cache(states[name], states[first]):
                raise ArgumentError(
                    f"kv_cache of layer {name!r} was that of layer {first!r} when it was registered, and is not now",
                    remedy="Bind them to one cache again, or call initialize_state_copy again.",
                    about=name,
                )
        if self._client is not None:
            self._client.rebind({first: states[first] for first in self._plans})
        self._publish(states)

    def close(self) -> None:
        """Detaches every layer and gives everything back. The connection is closed unless the caller made it."""
        if self._state is _State.CLOSED:
            return
        self._withdraw()
        self._state = _State.CLOSED
        for layer in self._layers:
            # A later initialisation may have attached its own already.
            if getattr(layer.module, PLAN_ATTRIBUTE, None) is self._copies.get(layer.name):
                layer.detach()
        if self._client is None:
            return
        try:
            if self._owns_client:
                self._client.close()
            else:
                self._client.release()
        except Error as failed:
            # The layers are detached, whatever became of the daemon or of the caller's client.
            _log.warning("what a closed state copy held was not given back in order: %s", failed)

    def why_not_ready(self) -> str:
        """Why a copy is refused, as a clause."""
        return self._state.value

    def how_to_be_ready(self) -> str:
        """What makes a refused copy work, as a sentence."""
        if self._state is _State.ASLEEP:
            return "Call rebind() of the StateCopy once the caches are bound again."
        return "Call initialize_state_copy after the caches are bound."

    def __enter__(self) -> StateCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StateCopy({len(self._layers)} layers, {self._state.name.lower()})"

    def _start(self, max_num_seqs: int, states: Mapping[str, torch.Tensor], *, null_row: NullRow, debug: bool) -> None:
        if self._client is not None:
            self._registered_as = first_of_each_cache(states)
            caches = {first: states[first] for first in self._registered_as.values()}
            self._plans = self._client.register(caches, max_selected=max_num_seqs, check_unique=debug)
        for layer in self._layers:
            copy = LayerStateCopy(self, layer.name, skips_null_row=null_row == "skip", debug=debug)
            self._copies[layer.name] = copy
            layer.attach(copy)
        self._publish(states)

    def _publish(self, states: Mapping[str, torch.Tensor]) -> None:
        for name, state in states.items():
            self._copies[name].wake(self._plans[self._registered_as[name]], state)
        # No layer may copy before each of them can.
        for layer in self._layers:
            layer.publish()
        self._state = _State.READY

    def _withdraw(self) -> None:
        for layer in self._layers:
            layer.withdraw()
        for copy in self._copies.values():
            copy.fall_asleep()
        self._state = _State.ASLEEP

    def _refuse_when_closed(self, call: str) -> None:
        if self._state is _State.CLOSED:
            raise ClosedError(
                f"{call}() of a StateCopy that is closed: {self._state.value}",
                remedy="Use the StateCopy that the latest initialize_state_copy returned.",
            )


def initialize_state_copy(
    static_forward_context: Mapping[str, Any],
    max_num_seqs: int,
    *,
    predicate: Predicate | None = None,
    client: Client | None = None,
    address: str | None = None,
    null_row: NullRow = "as_is",
    debug: bool = False,
    **connect_options: Any,
) -> StateCopy:
    """Registers the states of all layers that take part, and attaches to each what it calls in prefill.

    Call it after the runner has bound its caches, and before warm-up, graph capture and the first request; let what
    it raises end the worker's start. A layer takes part where its class has ``_requires_kda_state_copy``, and where
    ``predicate(name, layer)`` is true. Its ``kv_cache`` must be bound: a tuple or list of tensors with the state
    ``[N, H, V, K]`` second, of exactly two for a marked layer, of at least two for one that the predicate chose; a
    list of one such tuple, as older runners bind it, will do. Then ``layer._ascend_kda_state_copy`` is a
    :class:`LayerStateCopy`, and ``layer._kda_state_copy_ready`` is true. Every other layer is left alone. Layers of
    several KV-cache groups may be bound to one memory, as vLLM does it: it is registered once, under the first one's
    name.

    It is all or nothing: after a failure no layer has a state copy, neither a new one nor one of an earlier
    initialisation. Another call replaces the earlier one, as a runner needs that binds a throwaway cache while it
    profiles. Where no layer takes part (a pipeline stage without linear attention) it succeeds, and needs no daemon.

    Args:
        static_forward_context: The worker's layers by name, ``vllm_config.compilation_config.static_forward_context``.
        max_num_seqs: The most rows that one copy selects, ``vllm_config.scheduler_config.max_num_seqs``.
        predicate: Chooses unmarked layers, by name and module. For upstream layers, which have no marker.
        client: A client to register with, in place of a connection of its own. Its own registration is replaced.
        address: Where the daemon listens; without it what ``STATECOPY_ADDR`` says.
        null_row: What row 0 is, which vLLM calls the null block and pads batches with: a row like any other
            (``"as_is"``), or padding that is mapped to -1 on the device (``"skip"``).
        debug: Refuses row 0 where it is not mapped, which reads the indices on the host, and repeated destinations.
        connect_options: What else :func:`statecopy.torch.connect` takes.

    Raises:
        ArgumentError: An argument that does not fit, a cache that is not bound, or a layout that is no state's.
        Error: What the daemon refuses, by family, and ``Unavailable`` where none answers.
    """
    _replace(static_forward_context)
    _check(max_num_seqs, null_row, client, {"address": address, **connect_options})
    layers = find(static_forward_context, predicate)
    if not layers:
        empty = StateCopy([], None, owns_client=False)
        empty._start(max_num_seqs, {}, null_row=null_row, debug=debug)
        return empty
    for layer in layers:
        layer.detach()
    states = {layer.name: layer.state() for layer in layers}
    owns_client = client is None
    if client is None:
        # All are on one device: the registration refuses others.
        device = states[layers[0].name].device
        client = statecopy.torch.connect(address, device=device, **connect_options)
    handle = StateCopy(layers, client, owns_client=owns_client)
    try:
        handle._start(max_num_seqs, states, null_row=null_row, debug=debug)
    except BaseException:
        handle.close()
        raise
    _log.info("state copies of %d layers are ready", len(layers))
    return handle


def _replace(context: Mapping[str, Any]) -> None:
    """Closes what an earlier initialisation of these layers attached."""
    for module in list(context.values()):
        attached = getattr(module, PLAN_ATTRIBUTE, None)
        if isinstance(attached, LayerStateCopy):
            attached.owner.close()


def _check(max_num_seqs: int, null_row: str, client: Client | None, connecting: Mapping[str, Any]) -> None:
    if isinstance(max_num_seqs, bool) or not isinstance(max_num_seqs, int) or max_num_seqs <= 0:
        raise ArgumentError(
            f"max_num_seqs is {max_num_seqs!r}, and a whole number of at least 1 is wanted",
            remedy="Pass scheduler_config.max_num_seqs.",
            about="max_num_seqs",
        )
    if null_row not in get_args(NullRow):
        raise ArgumentError(
            f"null_row is {null_row!r}, and one of {', '.join(map(repr, get_args(NullRow)))} is wanted",
            about="null_row",
        )
    given = sorted(name for name, value in connecting.items() if value is not None)
    if client is not None and given:
        raise ArgumentError(
            f"client and {', '.join(given)} are given, and a client is connected already",
            remedy="Pass the client alone, or what connects one.",
            about="client",
        )
