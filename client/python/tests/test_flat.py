"""Memory and descriptors stay as they are, however long a worker gathers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from oracle import Cache, int32, plan_of

if TYPE_CHECKING:
    import statecopy
    from daemon_process import Daemon

# A run of 1,000,000 is a matter of minutes: TEST_GATHERS=1000000.
GATHERS = int(os.environ.get("TEST_GATHERS", "100000"))
WARM_UP = 5_000
# For noise of the allocators of two processes; a leak of 24 bytes a gather would pass it.
GROWTH_KIB_MAX = 2048


def footprint(*pids: int) -> tuple[int, int, int]:
    """Anonymous memory in KiB, open descriptors and threads of these processes together."""
    kib = descriptors = threads = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        kib += int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0])
        threads += int(re.findall(r"Threads:\s+(\d+)", status)[0])
        descriptors += len(os.listdir(f"/proc/{pid}/fd"))
    return kib, descriptors, threads


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_is_flat_over_many_gathers(client: statecopy.Client, daemon: Daemon) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    pids = (os.getpid(), daemon.pid, daemon.device_process)
    indices, flags = int32(1, 3, -1, 5), np.array([True, False, True, True])
    inner = np.array([0, 2], dtype=np.int64)

    def run(times: int) -> None:
        # Each kind of call in turn: by far the most are plain gathers.
        for step in range(times):
            kind = step % 16
            if kind == 0:
                packed = plan.gather(inner)
                plan.scatter(packed, inner)
            elif kind == 1:
                plan.submit_gather(indices).wait()
            elif kind == 2:
                with pytest.raises(ValueError, match="INDEX_TYPE"):
                    plan.gather(flags)
            else:
                np.asarray(plan.gather(indices, flags))

    run(WARM_UP)
    before, counters = footprint(*pids), client.counters()
    run(GATHERS)
    after = footprint(*pids)
    grown = after[0] - before[0]
    print(f"{GATHERS} gathers: {grown} KiB more, {before[1:]} descriptors and threads before, {after[1:]} after")
    assert grown < GROWTH_KIB_MAX
    assert after[1] == before[1]
    # Threads of the daemon's that had nothing to do have ended.
    assert after[2] <= before[2]
    left = client.counters()
    for name in ("pool_bytes", "pool_buffers", "pool_misses", "regions_registered"):
        assert left[name] == counters[name], name
