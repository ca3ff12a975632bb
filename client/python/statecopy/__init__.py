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

from statecopy import _core
from statecopy._client import Client, Plans, connect
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
