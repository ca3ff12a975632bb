"""Where an operator of a compiled model finds its plan: by layer name, in the worker's forward context."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from statecopy.errors import ArgumentError, PlanError
from statecopy.torch.plan import Plan

# What vllm-ascend's layers call their plan.
LAYER_ATTRIBUTE = "_ascend_kda_state_copy"


@dataclass(frozen=True)
class ForwardContext:
    """The layers of a forward pass by name: a plan each, or what holds its plan as ``_ascend_kda_state_copy``."""

    no_compile_layers: Mapping[str, object]


class _Current(threading.local):
    """The contexts of this thread, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[ForwardContext] = []


_current = _Current()


@contextmanager
def forward_context(layers: Mapping[str, object]) -> Iterator[ForwardContext]:
    """Names the layers whose plans compiled code of this thread finds, as vLLM's ``set_forward_context`` does.

    A worker of vLLM does not need it: its own context is asked where none of these is active.
    """
    context = ForwardContext(layers)
    _current.contexts.append(context)
    try:
        yield context
    finally:
        _current.contexts.pop()


def find_plan(layer_name: str) -> Plan:
    """The plan of a layer in the context of this thread's forward pass.

    Raises ``ArgumentError`` outside of a forward pass and for a layer that is unknown there, ``PlanError`` for one that
    has no plan.
    """
    layers = _no_compile_layers(layer_name)
    try:
        holder = layers[layer_name]
    except KeyError:
        known = ", ".join(sorted(layers)) or "none"
        raise ArgumentError(
            f"layer_name is {layer_name!r}; the forward context knows {known}",
            remedy="Name the plan as its layer is named, and give the context of the model that runs.",
            about=layer_name,
        ) from None
    plan = _plan_of(holder)
    if plan is None:
        raise PlanError(
            f"The layer {layer_name!r} has no plan: {LAYER_ATTRIBUTE} is not set on the {type(holder).__name__}",
            code="NOT_SEALED",
            remedy="Initialise the state copy after the cache is bound, before warm-up and the first request.",
            about=layer_name,
        )
    return plan


def _plan_of(holder: object) -> Plan | None:
    """The plan itself, or that of a layer, or that of what a layer holds."""
    for candidate in (holder, getattr(holder, LAYER_ATTRIBUTE, None)):
        for plan in (candidate, getattr(candidate, "plan", None)):
            if isinstance(plan, Plan):
                return plan
    return None


def _no_compile_layers(layer_name: str) -> Mapping[str, Any]:
    if _current.contexts:
        return _current.contexts[-1].no_compile_layers
    # Only a process that imported vLLM can be inside one of its forward passes.
    vllm = sys.modules.get("vllm.forward_context")
    if vllm is not None and getattr(vllm, "is_forward_context_available", lambda: True)():
        layers: Mapping[str, Any] = vllm.get_forward_context().no_compile_layers
        return layers
    raise ArgumentError(
        f"layer_name is {layer_name!r}, and no forward context is active in this thread",
        remedy="Call compiled code inside of 'with statecopy.torch.forward_context({name: plan})', or of vLLM's.",
        about=layer_name,
    )
