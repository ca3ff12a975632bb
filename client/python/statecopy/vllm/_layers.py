"""Which layers of a worker take part, and where their states lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from statecopy.errors import ArgumentError

REQUIRED_ATTRIBUTE = "_requires_kda_state_copy"
"""The marker of a layer's class. A layer takes part because of it, never because of its name or model."""

PLAN_ATTRIBUTE = "_ascend_kda_state_copy"
"""Where a layer looks for the object that copies."""

READY_ATTRIBUTE = "_kda_state_copy_ready"
"""Where a layer looks for whether it may use that object."""

# The caches of one layer, in the order of every such layer: the convolution's first, the recurrent state second.
_STATE_AT = 1
_CACHES = 2

Predicate = Callable[[str, Any], bool]


@dataclass(frozen=True)
class Layer:
    """A layer that takes part."""

    name: str
    module: Any
    marked: bool
    """Whether its class has the marker; otherwise a predicate chose it."""

    def attach(self, copy: Any) -> None:
        """Lets the layer see what copies. It may not use it before `publish`."""
        setattr(self.module, READY_ATTRIBUTE, False)
        setattr(self.module, PLAN_ATTRIBUTE, copy)

    def publish(self) -> None:
        """Lets the layer use what is attached."""
        setattr(self.module, READY_ATTRIBUTE, True)

    def withdraw(self) -> None:
        """Takes the permission back, and leaves what is attached: it says why it refuses."""
        setattr(self.module, READY_ATTRIBUTE, False)

    def detach(self) -> None:
        """Takes both away."""
        self.attach(None)

    def state(self) -> torch.Tensor:
        """The recurrent state `[N, H, V, K]` that is bound now."""
        state = self._caches()[_STATE_AT]
        if not isinstance(state, torch.Tensor):
            raise self._unbound(f"its second cache is {_kind(state)}, and a tensor is wanted")
        if state.numel() == 0:
            raise self._unbound(f"its state is an empty placeholder of shape {tuple(state.shape)}")
        if state.ndim != 4:
            raise ArgumentError(
                f"kv_cache of layer {self.name!r}: the second cache has shape {tuple(state.shape)}, and a recurrent "
                f"state has 4 dimensions, [N, H, V, K]",
                remedy="Bind the caches as (convolution state, recurrent state).",
                about=self.name,
            )
        return state

    def _caches(self) -> tuple[Any, ...] | list[Any]:
        bound = getattr(self.module, "kv_cache", None)
        if not isinstance(bound, (tuple, list)):
            raise self._unbound(f"it is {_kind(bound)}, and a tuple or list of tensors is wanted")
        # Older runners bind a list with one entry for each virtual engine of a pipeline.
        if bound and all(isinstance(entry, (tuple, list)) for entry in bound):
            if len(bound) > 1:
                raise ArgumentError(
                    f"kv_cache of layer {self.name!r} is bound for {len(bound)} virtual engines, and one is supported",
                    remedy="Run one virtual engine a worker (pipeline_parallel_size=1 in V0, or V1).",
                    about=self.name,
                )
            bound = bound[0]
        if len(bound) < _CACHES or (self.marked and len(bound) != _CACHES):
            wanted = f"exactly {_CACHES}" if self.marked else f"at least {_CACHES}"
            raise self._unbound(f"it has {len(bound)} entries, and {wanted} are wanted, the recurrent state second")
        return bound

    def _unbound(self, why: str) -> ArgumentError:
        return ArgumentError(
            f"kv_cache of layer {self.name!r} is not bound: {why}",
            remedy="Call initialize_state_copy after the runner has bound its caches, before warm-up, capture and the "
            "first request.",
            about=self.name,
        )


def find(context: Mapping[str, Any], predicate: Predicate | None) -> list[Layer]:
    """The layers that take part, in the order of `context`."""
    layers = []
    for name, module in context.items():
        marked = bool(getattr(module, REQUIRED_ATTRIBUTE, False))
        if not marked and (predicate is None or not predicate(name, module)):
            continue
        if not isinstance(name, str):
            raise ArgumentError(
                f"static_forward_context: the name of a layer is {_kind(name)}, and text is wanted",
                remedy="Pass compilation_config.static_forward_context.",
                about="static_forward_context",
            )
        layers.append(Layer(name, module, marked))
    return layers


def is_same_cache(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two states are the same rows of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and (one.device, one.dtype) == (other.device, other.dtype)
        and (one.shape, one.stride()) == (other.shape, other.stride())
    )


def first_of_each_cache(states: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The first layer with the same cache, by layer: itself, unless several KV-cache groups share a memory."""
    firsts: list[str] = []
    found = {}
    for name, state in states.items():
        first = next((other for other in firsts if is_same_cache(state, states[other])), name)
        if first == name:
            firsts.append(name)
        found[name] = first
    return found


def _kind(value: object) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
