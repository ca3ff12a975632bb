"""Plans over torch tensors, with the meaning of an in-process plan.

    import statecopy.torch

    with statecopy.torch.connect(device="cuda:0") as client:
        plans = client.register({"layers.0": cache}, max_selected=64)
        packed = plans["layers.0"].gather(indices, has_initial_state)
        plans["layers.0"].scatter(final_state, indices)
        client.check()  # once a step: on a GPU the copies are in the order of the current stream

Needs torch 2.6 or later. Importing it defines the operators ``statecopy::kda_state_gather`` and
``statecopy::kda_state_scatter``, so that a compiled model may hold the copies of its layers.
"""

from __future__ import annotations

from statecopy.torch.client import Client, Plans, connect
from statecopy.torch.forward import ForwardContext, forward_context
from statecopy.torch.memory import empty
from statecopy.torch.operators import define as _define_operators
from statecopy.torch.plan import BindingSet, Plan

__all__ = [
    "BindingSet",
    "Client",
    "ForwardContext",
    "Plan",
    "Plans",
    "connect",
    "empty",
    "forward_context",
]

_define_operators("statecopy")
