#!/usr/bin/env python3
"""Measures what a copy costs a Python worker: through the daemon, by torch, and by a Triton kernel of its own.

usage: python tests/peers/bench.py --output FILE [--seed N] [--trials N] [--device cpu|cuda:N] [--cases PARTS]

One process calls every path in turn on the same tensors, in an order that is shuffled anew in each trial; one path is measured
twice under two labels. Every path's bytes are checked before anything is timed. It starts a daemon of its own (the binary that
STATECOPYD names; its settings STATECOPY_ARTIFACT_STORE, STATECOPY_CUDA__NVRTC_DIRECTORY and their like come from the
environment) and ends it. The record has the form of `statecopy bench`'s; an existing FILE is an error. With --rust, the
Rust client's own call is measured at the same daemon right after. docs/benchmarks/README.md says what the labels mean.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import hashlib
import importlib.util
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Before a folder of that name is in the way.
if importlib.util.find_spec("torch") is None:
    sys.exit(f"{Path(sys.argv[0]).name} needs torch, and this Python has none: pip install torch")
for folder in (HERE, HERE.parents[1] / "client" / "python" / "tests"):
    sys.path.insert(0, str(folder))

import step  # noqa: E402
import torch  # noqa: E402
from paths import GPU_ONLY, MEANINGS, Inputs, Peers, is_daemon, triton_rival  # noqa: E402

import statecopy.torch  # noqa: E402
from daemon_process import Daemon, binary  # noqa: E402

MODES = {
    "host_enqueue": "until the caller may go on: the daemon's submit, or torch's and Triton's launches on a GPU, have "
    "returned; on the host torch's caller is free only when the copy is done, so it is the whole call",
    "wall": "until the bytes are there and the caller knows it",
    "enqueue": "host time of one call where many are enqueued on a GPU's stream before it is waited for: an interval of so many "
    "by their number",
}
# So many: fewer than a lane holds copies, and than a stream takes launches before it stops the host.
ENQUEUED = 200
# As of `statecopy bench`: packed of up to so many bytes is warmed by an untimed call of the same path.
WARMED_BYTES_MAX = 4 << 20
# On a GPU so many bytes of outputs live at once, several times what its cache holds.
OUTPUTS_BYTES = 256 << 20
# Beyond these a claim of the project's would be missed: path over the faster of others, by device, operation and rows.
RATIOS = {("host", "gather", selected): (("torch_index", "index_select"), 1.0) for selected in (1, 8, 64)}
RATIOS |= {("cuda", "gather", 1): (("triton",), 0.7), ("cuda", "gather", 8): (("triton",), 0.6)}
SHARE_US_MAX = 3.0
ENQUEUE_MAX = 1.0
STEP_MAX = 0.8
# Variables that the daemon may see: where its kernels and its compiler are.
SETTINGS = ("STATECOPY_ARTIFACT_", "STATECOPY_CUDA__")
# Of the compiler, the environment and the allocator, as the daemon counts them itself.
ENTRIES = "statecopy_entries_while_serving_total"


@dataclass(frozen=True)
class Layout:
    """A layer's cache, as of `statecopy bench`."""

    name: str
    payload: tuple[int, int, int]
    page_stride: int
    rows: dict[str, int]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.payload) * 4

    def state(self, device: torch.device, rows: int) -> torch.Tensor:
        """``[N, H, V, K]`` in memory that the daemon can share, its payloads filled at random."""
        _, values, keys = self.payload
        shape, strides = (rows, *self.payload), (self.page_stride, values * keys, keys, 1)
        if device.type == "cpu":
            state = statecopy.torch.empty(shape, torch.float32, strides)
        else:
            state = torch.zeros(rows * self.page_stride, device=device).as_strided(shape, strides)
        return state.copy_(torch.rand(shape, device=device))


LAYOUTS = (
    Layout("24576", (3, 64, 32), 18_464, {"host": 192, "cuda": 4096}),
    Layout("kimi-k3-tp8", (12, 128, 128), 5_308_416, {"host": 96, "cuda": 512}),
)
SELECTED = {"24576": (1,), "kimi-k3-tp8": (1, 8, 64)}


@dataclass(frozen=True)
class Case:
    """One operation on so many rows of one layer."""

    layout: Layout
    selected: int
    operation: str

    @property
    def name(self) -> str:
        return f"{self.layout.name}/s{self.selected}/{self.operation}"

    @property
    def packed_bytes(self) -> int:
        return self.selected * self.layout.row_bytes


class Bench:
    """One layout's state and plan, and the way to measure its cases."""

    def __init__(
        self, client: Any, ordered: Any | None, layout: Layout, device: torch.device, order: random.Random
    ) -> None:
        kind = "cuda" if device.type == "cuda" else "host"
        self.kind, self.device, self.layout, self.order = kind, device, layout, order
        self.state = layout.state(device, layout.rows[kind])
        selected = max(SELECTED[layout.name])
        self.plan = client.register({layout.name: self.state}, max_selected=selected, layers=False)[layout.name]
        self.client, self.ordered = ordered, None
        if ordered is not None:
            plans = ordered.register({layout.name: self.state}, max_selected=selected, layers=False)
            self.ordered = plans[layout.name]
        self.none = torch.empty(0, dtype=torch.int32, device=device)
        self.walk = list(range(layout.rows[kind]))
        order.shuffle(self.walk)
        self.at = 0

    def buffers(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """Final states, in memory that the daemon can share and in memory of torch's own: one of each for a case."""
        shape = (case.selected, *self.layout.payload)
        private = torch.rand(shape, device=self.device)
        shared = statecopy.torch.empty(shape, torch.float32) if self.kind == "host" else torch.empty_like(private)
        return shared.copy_(private), private

    def inputs(self, case: Case, buffers: tuple[torch.Tensor, torch.Tensor]) -> Inputs:
        """The next rows of a walk through all rows of the cache."""
        if self.at + case.selected > len(self.walk):
            self.order.shuffle(self.walk)
            self.at = 0
        rows = self.walk[self.at : self.at + case.selected]
        self.at += case.selected
        packed, private = buffers
        return Inputs(
            rows=torch.tensor(rows, dtype=torch.int32, device=self.device),
            rows64=torch.tensor(rows, device=self.device),
            flags=torch.full((case.selected,), case.operation != "clear", device=self.device),
            packed=packed,
            private=private,
        )

    def synchronise(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def check(self, case: Case, peers: Peers) -> None:
        """Every path's bytes, and every row of the state, before anything is timed."""
        for path, call in peers.calls.items():
            given = self.inputs(case, self.buffers(case))
            before = self.state.clone()
            after = before.clone()
            expected = before[given.rows64]
            if case.operation == "clear":
                expected.zero_()
            if case.operation == "scatter":
                after[given.rows64] = given.packed
            output = call(given)
            self.synchronise()
            if not _equal(self.state, after):
                raise AssertionError(f"{case.name}: {path} leaves wrong bytes in the state")
            if case.operation != "scatter" and not _equal(output, expected):
                raise AssertionError(f"{case.name}: {path} gives wrong bytes")

    def measure(self, case: Case, trials: int) -> dict[str, dict[str, list[float]]]:
        """Samples in microseconds by mode and path, in the order of the trials."""
        peers = Peers(self.plan, self.ordered, self.state, case.operation, case.selected)
        self.check(case, peers)
        enqueued = [path for path in peers.calls if path in peers.submits or not is_daemon(path)]
        order = [("wall", path) for path in peers.calls] + [("host_enqueue", path) for path in enqueued]
        if self.kind == "cuda":
            order += [("enqueue", path) for path in enqueued if not is_daemon(path)]
        buffers, others = self.buffers(case), self.buffers(case)
        samples: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
        for mode, path in order:
            samples[mode][path] = []
        kept = 0 if self.kind == "host" else min(64, OUTPUTS_BYTES // case.packed_bytes)
        outputs: collections.deque[Any] = collections.deque(maxlen=kept)
        for _ in range(trials):
            self.order.shuffle(order)
            given, other = self.inputs(case, buffers), self.inputs(case, others)
            for mode, path in order:
                if self.kind == "cuda":
                    outputs.append(peers.calls[path](other))
                elif case.packed_bytes <= WARMED_BYTES_MAX:
                    peers.calls[path](given)
                elif is_daemon(path):
                    self.plan.gather(self.none)
                took, output = self.interval(peers, mode, path, given)
                outputs.append(output)
                del output
                samples[mode][path].append(took)
        if self.client is not None:
            self.client.check()
        return {mode: of for mode, of in samples.items() if of}

    def parts(self, trials: int) -> dict[str, float]:
        """Medians in microseconds of what a call is made of: where a copy's time goes that is no copy."""
        rows = torch.zeros(1, dtype=torch.int32, device=self.device)
        calls: dict[str, Any] = {
            "operand": lambda: self.plan.route(rows),
            "empty_request": lambda: self.plan.gather(self.none),
            "capsule": lambda: torch._C._from_dlpack(rows.__dlpack__()),
        }
        if self.kind == "cuda":
            stream = torch.cuda.current_stream(self.device)
            calls["idle_stream_synchronise"] = stream.synchronize
            calls["launch"] = lambda: rows.add_(0)
            calls["launch_and_synchronise"] = lambda: (rows.add_(0), stream.synchronize())
        samples: dict[str, list[float]] = {part: [] for part in calls}
        for _ in range(trials):
            for part, call in calls.items():
                self.synchronise()
                begin = time.perf_counter_ns()
                call()
                samples[part].append((time.perf_counter_ns() - begin) / 1e3)
        return {part: statistics.median(of) for part, of in samples.items()}

    def interval(self, peers: Peers, mode: str, path: str, given: Inputs) -> tuple[float, Any]:
        """One call, and what it left: dropped by the caller, outside of the interval."""
        if mode == "enqueue":
            return self.enqueued(peers.calls[path], given), None
        submits = mode == "host_enqueue" and path in peers.submits
        call = peers.submits[path] if submits else peers.calls[path]
        waits = mode == "wall" and self.kind == "cuda" and not is_daemon(path)
        self.synchronise()
        begin = time.perf_counter_ns()
        output = call(given)
        if waits:
            torch.cuda.synchronize()
        took = time.perf_counter_ns() - begin
        if submits:
            output = output.wait()
        self.synchronise()
        return took / 1e3, output

    def enqueued(self, call: Any, given: Inputs) -> float:
        """Of many calls on the stream, what one takes of the host's time."""
        self.synchronise()
        begin = time.perf_counter_ns()
        for _ in range(ENQUEUED):
            call(given)
        took = time.perf_counter_ns() - begin
        self.synchronise()
        return took / 1e3 / ENQUEUED


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def chosen(parts: str) -> list[Case]:
    """Cases whose names hold one of these parts; all of them for none."""
    cases = [
        Case(layout, selected, operation)
        for layout in LAYOUTS
        for selected in SELECTED[layout.name]
        for operation in ("gather", "clear", "scatter")
    ]
    wanted = [part for part in parts.split(",") if part]
    return [case for case in cases if not wanted or any(part in case.name for part in wanted)]


def has_step(parts: str, device: str) -> bool:
    """Whether the copies of a whole step are chosen: a GPU has them."""
    wanted = [part for part in parts.split(",") if part]
    return device != "cpu" and (not wanted or any(part in step.NAME for part in wanted))


def rust_client(program: Path, address: str, cases: list[Case], device: str, trials: int, seed: int) -> dict[str, Any]:
    """What `statecopy bench` measures at the same daemon: the Rust client's own call of the same cases."""
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "rust.json"
        names = ",".join(case.name for case in cases)
        subprocess.run(
            [
                *(program, "bench", "--output", file, "--address", address, "--cases", names, "--trials", str(trials)),
                *("--seed", str(seed), "--device", "host" if device == "cpu" else device),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(file.read_text(encoding="utf-8"))
    return {name: found[name] for name in ("medians_us", "samples_us", "source", "pinning", "settings")}


def _read(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8").strip()
    return None


def machine() -> dict[str, Any]:
    """What the samples depend on beside the programs."""
    models = [
        line.split(":", 1)[1].strip() for line in (_read("/proc/cpuinfo") or "").splitlines() if "model name" in line
    ]
    memory = [line.split()[1] for line in (_read("/proc/meminfo") or "").splitlines() if line.startswith("MemTotal")]
    return {
        "cpu_model": models[0] if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_kib": int(memory[0]) if memory else None,
        "transparent_hugepage": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average_before": os.getloadavg()[0],
        "load_average_after": None,
    }


def source(commit: str | None, programs: dict[str, Path]) -> dict[str, Any]:
    """What was measured, and by which programs: the hashes of their files."""
    core = Path(sys.modules["statecopy._core"].__file__ or "")
    files = {**programs, "extension": core, "daemon": binary()}
    hashes = {f"{name}_sha256": hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    return {"version": statecopy.__version__, "commit": commit, **hashes}


def device_facts(device: torch.device) -> dict[str, Any]:
    """What copies, and with what torch."""
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        rival = triton_rival()
        facts |= {"triton": rival.triton.__version__, "block": str(rival.BLOCK), "warps": str(rival.WARPS)}
    return {"kind": "cuda" if device.type == "cuda" else "host", "name": name, "configuration": facts, "nvidia_smi": []}


def report(record: dict[str, Any], cases: list[Case]) -> None:
    """The tables, last of what is printed."""
    medians, kind = record["medians_us"], record["device"]["kind"]
    for mode in MODES:
        print(f"\n{mode}, medians in us")
        for case in cases:
            found = medians[case.name].get(mode, {})
            row = "  ".join(f"{path} {found[path]:.1f}" for path in sorted(found))
            print(f"  {case.name:28} {row}")
    print("\nparts of a call, medians in us")
    for layout, parts in record["parts_us"].items():
        print(f"  {layout:28} " + "  ".join(f"{part} {us:.2f}" for part, us in parts.items()))
    print()
    for case in cases:
        found = medians[case.name]["wall"]
        ratio = RATIOS.get((kind, case.operation, case.selected))
        if ratio is not None and case.layout.name == "kimi-k3-tp8":
            rivals, bound = ratio
            best = min(found[rival] for rival in rivals)
            verdict(f"{case.name}: daemon / {' or '.join(rivals)}", found["daemon"] / best, bound)
        enqueue = medians[case.name].get("enqueue")
        if enqueue is not None and case.operation == "gather":
            ratio_found = enqueue["ordered"] / enqueue["triton"]
            verdict(f"{case.name}: ordered / triton, to enqueue one", ratio_found, ENQUEUE_MAX)
        rust = (record["rust"] or {"medians_us": {}})["medians_us"].get(case.name)
        # Of larger copies the two medians differ by more than what is sought.
        if rust is not None and case.operation != "scatter" and case.packed_bytes <= WARMED_BYTES_MAX:
            verdict(f"{case.name}: Python's share in us", found["daemon"] - rust["wall"]["ring"], SHARE_US_MAX)
    if step.NAME in medians:
        found = medians[step.NAME]["wall"]
        row = "  ".join(f"{path} {found[path]:.1f}" for path in sorted(found))
        print(f"  {step.NAME}, wall, medians in us: {row}")
        verdict(f"{step.NAME}: ordered / triton", found["ordered"] / found["triton"], STEP_MAX)


def verdict(what: str, found: float, bound: float) -> None:
    print(f"  {what}: {found:.2f}, at most {bound}: {'yes' if found <= bound else 'NO'}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where the record goes; it must not exist")
    parser.add_argument("--seed", type=int, default=1, help="of orders, rows and bytes; each has a process of its own")
    parser.add_argument("--trials", type=int, default=100, help="how often every path of every case is measured")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument(
        "--cases", default="", metavar="PARTS", help="only cases whose name holds one of these, by commas"
    )
    parser.add_argument("--all-cores", action="store_true", help="pin nobody; daemon and torch copy with every CPU")
    parser.add_argument(
        "--rust", type=Path, metavar="STATECOPY", help="the command, to measure the Rust client's call too"
    )
    parser.add_argument("--commit", help="the commit that was built, for the record")
    options = parser.parse_args()
    if options.output.exists():
        parser.error(f"{options.output} exists: each seed has a file of its own")
    if not chosen(options.cases) and not has_step(options.cases, options.device):
        parser.error(f"no case's name holds {options.cases!r}")
    return options


def pinned(all_cores: bool) -> dict[str, int] | None:
    """One CPU for this process and another one for the daemon's executor; None where both may use all."""
    cpus = sorted(os.sched_getaffinity(0))
    return None if all_cores or len(cpus) == 1 else {"worker": cpus[0], "executor": cpus[-1]}


def measure(
    daemon: Daemon,
    device: torch.device,
    cases: list[Case],
    options: argparse.Namespace,
    pinning: dict[str, int] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All samples by case, mode and path, and the parts of a call by layout."""
    samples: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    torch.manual_seed(options.seed)
    order = random.Random(options.seed)
    name = None if device.type == "cpu" else device
    with contextlib.ExitStack() as clients:
        client = clients.enter_context(statecopy.torch.connect(daemon.address, device=name, completion="host"))
        ordered = None
        if device.type == "cuda":
            ordered = clients.enter_context(statecopy.torch.connect(daemon.address, device=name))
        if pinning is not None:
            # Not before: a client that finds one CPU at its start never spins.
            os.sched_setaffinity(0, {pinning["worker"]})
            torch.set_num_threads(1)
        gc.disable()
        for layout in LAYOUTS:
            of_layout = [case for case in cases if case.layout == layout]
            if not of_layout:
                continue
            bench = Bench(client, ordered, layout, device, order)
            before = daemon.metric(ENTRIES)
            for case in of_layout:
                samples[case.name] = bench.measure(case, options.trials)
                print(f"{len(samples)} of {len(cases)}: {case.name}", file=sys.stderr, flush=True)
            parts[layout.name] = bench.parts(max(options.trials, 100))
            if (entries := daemon.metric(ENTRIES) - before) != 0:
                raise AssertionError(
                    f"{entries:.0f} entries of the compiler, environment or allocator while the trials ran"
                )
            client.release()
            if ordered is not None:
                ordered.release()
            del bench
        if has_step(options.cases, options.device):
            samples[step.NAME] = step.Step(client, ordered, device, order).measure(options.trials)
        gc.enable()
    return samples, parts


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything between the daemon's start and its end, and the record of it."""
    cases, device = chosen(options.cases), torch.device(options.device)
    begin, facts = time.time(), machine()
    cpus, pinning = os.sched_getaffinity(0), pinned(options.all_cores)
    flags = ["--device", "host" if device.type == "cpu" else options.device]
    if pinning is not None:
        flags += ["--copy-threads", "1", "--executor-cpu", str(pinning["executor"])]
    variables = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    daemon = Daemon(*flags, variables=variables)
    try:
        samples, parts = measure(daemon, device, cases, options, pinning)
        os.sched_setaffinity(0, cpus)
        rust = None
        if options.rust is not None:
            rust = rust_client(options.rust, daemon.address, cases, options.device, options.trials, options.seed)
        daemon.stop()
    finally:
        daemon.end()
    facts["load_average_after"] = os.getloadavg()[0]
    return {
        "format": 1,
        "medians_us": {
            name: {mode: {path: statistics.median(of) for path, of in paths.items()} for mode, paths in modes.items()}
            for name, modes in samples.items()
        },
        "seed": options.seed,
        "trials": options.trials,
        "started_unix_s": int(begin),
        "took_s": round(time.time() - begin),
        "source": source(options.commit, {"bench": HERE / "bench.py", "paths": HERE / "paths.py"}),
        "machine": facts,
        "device": device_facts(device),
        "pinning": pinning,
        "rust": rust,
        "settings": settings(flags, options.all_cores),
        "compiler_entries_while_serving": 0,
        "cases": [described(case, device) for case in cases],
        "step": {"layers": step.LAYERS, "selected": step.SELECTED, "paths": step.MEANINGS}
        if step.NAME in samples
        else None,
        "modes": MODES,
        "paths": {path: meaning for path, meaning in MEANINGS.items() if device.type == "cuda" or path not in GPU_ONLY},
        "samples_us": samples,
        "parts_us": parts,
        # What `statecopy bench` has beside, and this one has not.
        **dict.fromkeys(("rival", "footprint", "extras", "kernels")),
    }


def settings(flags: list[str], all_cores: bool) -> dict[str, Any]:
    return {
        "daemon": {"flags": " ".join(flags)},
        "all_cores": all_cores,
        "torch_threads": torch.get_num_threads(),
        "interval": "the output's allocation, index and flag handling, the copy; the output is dropped outside",
        "before_interval": "on a GPU one untimed call of the same path with other rows; on the host one with the same "
        "inputs where packed is at most 4 MiB, else an empty request of the daemon's paths",
    }


def described(case: Case, device: torch.device) -> dict[str, Any]:
    return {
        "name": case.name,
        "operation": case.operation,
        "row_bytes": case.layout.row_bytes,
        "page_stride_bytes": case.layout.page_stride * 4,
        "cache_rows": case.layout.rows["host" if device.type == "cpu" else "cuda"],
        "selected": case.selected,
        "layers": 1,
        "warmed": device.type == "cpu" and case.packed_bytes <= WARMED_BYTES_MAX,
    }


def main() -> None:
    options = arguments()
    record = run(options)
    with options.output.open("x", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    report(record, chosen(options.cases))


if __name__ == "__main__":
    main()
