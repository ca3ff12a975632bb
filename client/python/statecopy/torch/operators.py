"""The copies as custom operators, for models that are traced.

``kda_state_gather(state, indices, flags, layer_name)`` and ``kda_state_scatter(state, packed, indices, layer_name)``
run the plan that the forward context holds for the layer; eager calls of a plan do not pass here. They are no
replacement for ``_C_ascend::kda_state_copy``.
"""

from __future__ import annotations

import threading

import torch
from torch.library import Library

from statecopy.errors import ArgumentError
from statecopy.torch.checks import check_flags, check_indices, check_packed, check_state
from statecopy.torch.forward import find_plan

GATHER = "kda_state_gather"
SCATTER = "kda_state_scatter"

_SCHEMAS = {
    GATHER: "(Tensor state, Tensor indices, Tensor? flags, str layer_name) -> Tensor",
    SCATTER: "(Tensor(a!) state, Tensor packed, Tensor indices, str layer_name) -> ()",
}

# The definitions live as long as these.
_libraries: dict[str, Library] = {}
_defining = threading.Lock()


def define(namespace: str) -> bool:
    """Defines both operators in a namespace where nobody has defined either. Whether they are this package's now.

    A namespace of somebody else's is claimed as late as can be: whoever defines the same names after this is refused by
    torch, unless :func:`withdraw` was called before.
    """
    with _defining:
        if namespace in _libraries:
            return True
        if any(_is_defined(f"{namespace}::{name}") for name in _SCHEMAS):
            return False
        library = Library(namespace, "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(GATHER, _gather, "CompositeExplicitAutograd")
        library.impl(SCATTER, _scatter, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{GATHER}", _gather_fake, lib=library)
        torch.library.register_fake(f"{namespace}::{SCATTER}", _scatter_fake, lib=library)
        _libraries[namespace] = library
        return True


def withdraw(namespace: str) -> None:
    """Takes the definitions of a namespace back, for whoever is to define them. What was compiled with them is void."""
    with _defining:
        library = _libraries.pop(namespace, None)
        if library is not None:
            library._destroy()


def _is_defined(name: str) -> bool:
    namespace, _, operator = name.partition("::")
    return hasattr(getattr(torch.ops, namespace), operator)


def _gather(state: torch.Tensor, indices: torch.Tensor, flags: torch.Tensor | None, layer_name: str) -> torch.Tensor:
    plan = find_plan(layer_name)
    plan.check_state(state)
    return plan.gather(indices, flags)


def _scatter(state: torch.Tensor, packed: torch.Tensor, indices: torch.Tensor, layer_name: str) -> None:
    plan = find_plan(layer_name)
    plan.check_state(state)
    plan.scatter(packed, indices)


def _gather_fake(
    state: torch.Tensor, indices: torch.Tensor, flags: torch.Tensor | None, layer_name: str
) -> torch.Tensor:
    _check_layer(layer_name)
    check_state(state)
    check_indices(state, indices)
    if flags is not None:
        check_flags(state, indices, flags)
    return state.new_empty((indices.shape[0], *state.shape[1:]))


def _scatter_fake(state: torch.Tensor, packed: torch.Tensor, indices: torch.Tensor, layer_name: str) -> None:
    _check_layer(layer_name)
    check_state(state)
    check_indices(state, indices)
    check_packed((indices.shape[0], *state.shape[1:]), state, packed)


def _check_layer(layer_name: str) -> None:
    if not layer_name:
        raise ArgumentError(
            "The plan was registered without a layer: it is for eager calls and graphs, and cannot be compiled",
            remedy="Register with layers=True, under the names of the layers in the forward context.",
            about="layer_name",
        )
