"""State copies in a vLLM worker: two calls beside the runner's own, and layers that work unchanged.

:func:`initialize_state_copy` is called where the runner has bound its caches, before warm-up, graph capture and the
first request. It finds the layers that want state copies, registers their caches with the daemon, all or none, and
attaches to each one an object with ``gather(state, indices, flags)`` and ``scatter(state, packed, indices)``, as the
layers of vllm-ascend call it. :meth:`StateCopy.release` and :meth:`StateCopy.rebind` stand around the worker's sleep.

It needs torch, and neither vLLM nor vllm-ascend: it reads a few attributes of the layers and knows no class of theirs.
"""

from __future__ import annotations

from statecopy.vllm._attached import LayerStateCopy
from statecopy.vllm._handle import StateCopy, initialize_state_copy
from statecopy.vllm._layers import PLAN_ATTRIBUTE, READY_ATTRIBUTE, REQUIRED_ATTRIBUTE

__all__ = [
    "PLAN_ATTRIBUTE",
    "READY_ATTRIBUTE",
    "REQUIRED_ATTRIBUTE",
    "LayerStateCopy",
    "StateCopy",
    "initialize_state_copy",
]
