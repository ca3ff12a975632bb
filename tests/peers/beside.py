#!/usr/bin/env python3
"""Measures what the copies of one worker notice of another one that registers and releases.

usage: python tests/peers/beside.py --output FILE [--device cpu|cuda:N] [--seconds S]

This process gathers the same rows again and again, each time until the bytes are there: first alone, then beside a process that
registers a layer in new memory, gathers from it, and releases it, as often as it can. That layer's kernels are those of this
process's layer ('loaded'), or of four other types in turn, which are loaded and dropped each time ('new_kernels'). On a GPU a kernel of
torch is measured beside as well, which knows no daemon ('torch').

It starts a daemon of its own, as tests/peers/bench.py does. The record is one JSON object; an existing FILE is an error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
import torch

import statecopy.torch
from daemon_process import Daemon

SHAPE = (64, 4, 64, 128)
SELECTED = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
NEIGHBOURS = {"loaded": DTYPES[:1], "new_kernels": DTYPES[1:]}
PARTS = ("register", "gather", "release")


class Worker:
    """A client of a device, and its memory."""

    def __init__(self, address: str, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.client = statecopy.torch.connect(address, device=device if self.on_gpu else None, wait_s=30)
        self.rows = torch.arange(SELECTED, device=device)

    def register(self, dtype: torch.dtype) -> Any:
        """The plan of a layer in memory that was not there before."""
        if self.on_gpu:
            state = torch.zeros(SHAPE, device=self.device, dtype=dtype)
        else:
            state = statecopy.torch.empty(SHAPE, dtype)
        return self.client.register({"layer": state}, max_selected=SELECTED, layers=False)["layer"]

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.current_stream(self.device).synchronize()

    def neighbour(self, dtypes: tuple[torch.dtype, ...]) -> None:
        """Registers and releases until its input ends. Prints how many times, and the medians of each part."""
        took: dict[str, list[float]] = {part: [] for part in PARTS}
        self.round(dtypes[0], {part: [] for part in PARTS})
        print("begun", flush=True)
        os.set_blocking(sys.stdin.fileno(), False)
        rounds = 0
        # None: nothing to read yet.
        while rounds == 0 or sys.stdin.buffer.raw.read(1) is None:
            rounds += 1
            self.round(dtypes[rounds % len(dtypes)], took)
        self.client.close()
        medians = {part: quantile(of, 0.5) for part, of in took.items()}
        print(json.dumps({"rounds": rounds, "medians_us": medians}))

    def round(self, dtype: torch.dtype, took: dict[str, list[float]]) -> None:
        at = [time.perf_counter_ns()]
        plan = self.register(dtype)
        at.append(time.perf_counter_ns())
        plan.gather(self.rows)
        self.wait()
        at.append(time.perf_counter_ns())
        self.client.release()
        at.append(time.perf_counter_ns())
        for part, (begin, end) in zip(PARTS, itertools.pairwise(at), strict=True):
            took[part].append((end - begin) / 1e3)
        del plan
        if self.on_gpu:
            torch.cuda.empty_cache()
        self.client.trim()


def quantile(samples: list[float], part: float) -> float:
    return sorted(samples)[int((len(samples) - 1) * part)]


def timed(call: Callable[[], Any], wait: Callable[[], None], seconds: float) -> dict[str, float]:
    """How long each of the calls took that fit in so many seconds, until its bytes were there."""
    samples: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.perf_counter_ns()
        call()
        wait()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    tail = {"median_us": 0.5, "p99_us": 0.99, "p99_9_us": 0.999, "longest_us": 1.0}
    return {"calls": len(samples), **{name: quantile(samples, part) for name, part in tail.items()}}


def measured(worker: Worker, plan: Any, seconds: float) -> dict[str, Any]:
    found = {"copies": timed(lambda: plan.gather(worker.rows), worker.wait, seconds)}
    if worker.on_gpu:
        values = torch.zeros(SELECTED, *SHAPE[1:], device=worker.device)
        found["torch"] = timed(lambda: values.add_(1), worker.wait, seconds)
    worker.client.check()
    return found


def beside(worker: Worker, plan: Any, address: str, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--neighbour", kind, "--address", address, "--device", options.device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            line = other.stdout.readline()
            if line != "begun\n":
                raise AssertionError(f"the neighbour did not begin: {line!r}")
            found = measured(worker, plan, options.seconds)
            told, _ = other.communicate(timeout=60)
            if other.returncode != 0:
                raise AssertionError(f"the neighbour ended with {other.returncode}")
        except BaseException:
            other.kill()
            raise
    return {**found, "neighbour": json.loads(told)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    device, begin, facts = torch.device(options.device), time.time(), bench.machine()
    flags = ["--device", options.device if device.type == "cuda" else "host"]
    variables = {name: value for name, value in os.environ.items() if name.startswith(bench.SETTINGS)}
    daemon = Daemon(*flags, variables=variables)
    try:
        worker = Worker(daemon.address, device)
        plan = worker.register(DTYPES[0])
        measured(worker, plan, options.seconds / 4)
        samples = {"alone": measured(worker, plan, options.seconds)}
        for kind in NEIGHBOURS:
            print(f"beside: {kind}", file=sys.stderr, flush=True)
            samples[kind] = beside(worker, plan, daemon.address, kind, options)
        worker.client.close()
        daemon.stop()
    finally:
        daemon.end()
    facts["load_average_after"] = os.getloadavg()[0]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "host"
    return {
        "format": 1,
        "started_unix_s": int(begin),
        "seconds": options.seconds,
        "source": bench.source(options.commit, {"beside": Path(__file__)}),
        "machine": facts,
        "device": name,
        "payload_bytes": 4 * SHAPE[1] * SHAPE[2] * SHAPE[3],
        "selected": SELECTED,
        "beside": samples,
    }


def report(record: dict[str, Any]) -> None:
    for kind, found in record["beside"].items():
        for path in ("copies", "torch"):
            if path in found:
                row = "  ".join(f"{name} {value:.0f}" for name, value in found[path].items())
                print(f"{kind:12} {path:7} {row}")
        if "neighbour" in found:
            other = found["neighbour"]
            row = "  ".join(f"{part} {us:.0f} us" for part, us in other["medians_us"].items())
            print(f"{'':12} neighbour: {other['rounds']} rounds, {row}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the record goes; it must not exist")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each path is measured in each company")
    parser.add_argument("--commit", help="the commit that was built, for the record")
    parser.add_argument("--neighbour", choices=NEIGHBOURS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not 0.1 <= options.seconds <= 600:
        parser.error(f"--seconds {options.seconds}: 0.1 to 600 are measured")
    if options.neighbour is None and options.output is None:
        parser.error("--output is needed")
    if options.output is not None and options.output.exists():
        parser.error(f"{options.output} exists: each run has a file of its own")
    return options


def main() -> None:
    options = arguments()
    if options.neighbour is not None:
        Worker(options.address, torch.device(options.device)).neighbour(NEIGHBOURS[options.neighbour])
        return
    record = run(options)
    options.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    report(record)


if __name__ == "__main__":
    main()
