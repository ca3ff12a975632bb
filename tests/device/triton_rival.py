#!/usr/bin/env python3
"""Makes the copies of `statecopy bench --device cuda:N` with Triton and torch, and times itself when it is asked to.

usage: statecopy bench --device cuda:0 --rival 'python3 tests/device/triton_rival.py' --output FILE

The benchmark starts it, sends one JSON object a line to its standard input and reads one answer a line. First it says what it
is; then it answers 'prepare' (make a case ready and check the bytes of every path), 'time' (one interval of one path) and
'kernels' (device time in replayed graphs, of the daemon's own kernel beside Triton's). It ends with its input. Needs torch and
triton. With --cpu N it stays on that CPU: the worker's, which waits meanwhile.

Everything that is not the copy is done before an interval: indices and flags are on the device, the kernel is compiled, the
launcher is bound to its grid. An interval holds the output's allocation, as the other paths' does.
"""

import argparse
import collections
import ctypes
import gc
import json
import os
import random
import struct
import sys
import time

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4  # the best of what was tried on an H200: kernel_probe.py tries them
ITEM_BYTES = 4
MEMCPY_BYTES = 8 << 30
MEMCPY_TIMES = 10


@triton.jit
def gather(cache, packed, indices, flags, rows, page_stride, PAYLOAD: tl.constexpr, FLAGS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row).to(tl.int64)
    valid = (index >= 0) & (index < rows)
    if FLAGS:
        valid = valid & (tl.load(flags + row) != 0)
    inside = at < PAYLOAD
    values = tl.load(cache + index * page_stride + at, mask=inside & valid, other=0.0)
    tl.store(packed + row * PAYLOAD + at, values, mask=inside)


@triton.jit
def scatter(cache, packed, indices, flags, rows, page_stride, PAYLOAD: tl.constexpr, FLAGS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row).to(tl.int64)
    valid = (index >= 0) & (index < rows)
    inside = at < PAYLOAD
    values = tl.load(packed + row * PAYLOAD + at, mask=inside & valid, other=0.0)
    tl.store(cache + index * page_stride + at, values, mask=inside & valid)


class Cache:
    """One layer, as the benchmark's."""

    def __init__(self, layout):
        self.rows, self.page_stride, self.payload = layout["rows"], layout["page_stride"], layout["payload"]
        memory = torch.zeros(self.rows * self.page_stride, device="cuda")
        self.base = memory[layout["offset"] :]
        self.states = torch.as_strided(memory, (self.rows, self.payload), (self.page_stride, 1), layout["offset"])
        self.states.copy_(torch.rand((self.rows, self.payload), device="cuda"))


class Case:
    """One case: its kernel, its packed buffers, its paths."""

    def __init__(self, request, cache):
        self.cache, self.operation, self.selected = cache, request["operation"], request["selected"]
        self.shape = (self.selected, cache.payload)
        self.kernel = scatter if self.operation == "scatter" else gather
        self.grid = (triton.cdiv(cache.payload, BLOCK), self.selected, 1)
        self.flags = torch.zeros(self.selected, dtype=torch.uint8, device="cuda")
        self.kept = torch.zeros(self.selected, dtype=torch.bool, device="cuda").unsqueeze(1)
        # Outputs live for as long as in the benchmark's pool, so that the allocator gives the oldest memory.
        self.outputs = collections.deque(torch.rand(self.shape, device="cuda") for _ in range(request["buffers"]))
        indices = self.indices(list(range(self.selected)))
        packed = self.outputs[0]
        compiled = self.kernel[self.grid](*self.arguments(packed, indices), num_warps=WARPS)
        self.launcher = compiled[self.grid]
        self.paths = {
            "triton": self.triton,
            "triton_preallocated": self.triton,
            "triton_jit": self.triton_jit,
            "torch_index": self.torch_index,
        }

    def indices(self, rows):
        return torch.tensor(rows, dtype=torch.int32, device="cuda"), torch.tensor(rows, device="cuda")

    def arguments(self, packed, indices):
        cache = self.cache
        clear = self.operation == "clear"
        return (cache.base, packed, indices[0], self.flags, cache.rows, cache.page_stride, cache.payload, clear, BLOCK)

    def triton(self, packed, indices):
        if packed is None:
            packed = torch.empty(self.shape, device="cuda")
        self.launcher(*self.arguments(packed, indices))
        return packed

    def triton_jit(self, packed, indices):
        if packed is None:
            packed = torch.empty(self.shape, device="cuda")
        self.kernel[self.grid](*self.arguments(packed, indices), num_warps=WARPS)
        return packed

    def torch_index(self, packed, indices):
        if self.operation == "scatter":
            self.cache.states[indices[1]] = packed
            return packed
        gathered = self.cache.states[indices[1]]
        if self.operation == "clear":
            gathered.masked_fill_(~self.kept, 0)
        return gathered

    def call(self, path, indices):
        """One call and how long it took, in microseconds. The output is dropped outside."""
        given = None
        if self.operation == "scatter" or path == "triton_preallocated":
            given = self.outputs.popleft()
        run = self.paths[path]
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        output = run(given, indices)
        torch.cuda.synchronize()
        took = time.perf_counter_ns() - start
        self.outputs.append(output)
        if given is None:
            self.outputs.popleft()
        return took / 1e3

    def check(self, rows):
        """Every path's bytes, against torch on the states as they were."""
        indices = self.indices(rows)
        for path in self.paths:
            before = self.cache.states[indices[1]].clone()
            if self.operation == "scatter":
                self.outputs[0].copy_(torch.rand(self.shape, device="cuda"))
            self.call(path, indices)
            left, states = self.outputs[-1], self.cache.states[indices[1]]
            expected = {"gather": before, "clear": torch.zeros_like(before), "scatter": states}[self.operation]
            if not torch.equal(left.view(torch.int32), expected.view(torch.int32)):
                raise AssertionError(f"{path} left wrong bytes")


class Kernels:
    """Device time of one call in a graph of many: the daemon's kernel twice, and Triton's, over the same rows."""

    def __init__(self, request, cache):
        self.request, self.cache = request, cache
        self.driver = ctypes.CDLL("libcuda.so.1")
        with open(request["code"], "rb") as file:
            self.code = file.read()
        module = ctypes.c_void_p()
        self.driven("cuModuleLoadData", ctypes.byref(module), self.code)
        self.function = ctypes.c_void_p()
        self.driven("cuModuleGetFunction", ctypes.byref(self.function), module, request["entry"].encode())
        rows = list(range(cache.rows))
        random.Random(7).shuffle(rows)
        self.walk = rows
        self.packed = torch.empty((cache.rows, cache.payload), device="cuda")

    def driven(self, name, *arguments):
        status = getattr(self.driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} answers {status}")

    def rows_of(self, call, selected):
        """The rows of a call, and where its packed rows begin: the next ones of a walk through all."""
        first = call * selected % (self.cache.rows // selected * selected)
        return self.walk[first : first + selected], first

    def own(self, selected):
        values = {
            "shape": self.request["shape"],
            "base": self.cache.base.data_ptr(),
            "page_stride": self.cache.page_stride * ITEM_BYTES,
            "payload": self.cache.payload * ITEM_BYTES,
            "rows": self.cache.rows,
            "selected": selected,
            "index_width": 4,
        }
        columns = -(-self.cache.payload * ITEM_BYTES // self.request["chunk_bytes"])
        blocks = [columns, selected, 1, self.request["threads"], 1, 1, 0]

        def launch(call):
            rows, first = self.rows_of(call, selected)
            buffer = ctypes.create_string_buffer(self.request["arguments_bytes"])
            values["packed"] = self.packed[first].data_ptr()
            for name, offset, size in self.request["arguments"]:
                if name == "inline_bytes":
                    struct.pack_into(f"<{selected}i", buffer, offset, *rows)
                elif name in values:
                    struct.pack_into("<I" if size == 4 else "<Q", buffer, offset, values[name])
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self.driven("cuLaunchKernel", self.function, *blocks, stream, parameters, None)

        return launch

    def triton(self, selected):
        calls, cache = self.request["calls"], self.cache
        # Each call's indices begin on 16 bytes, as Triton likes its addresses.
        table = torch.zeros((calls, max(selected, 4)), dtype=torch.int32)
        for call in range(calls):
            table[call, :selected] = torch.tensor(self.rows_of(call, selected)[0], dtype=torch.int32)
        table = table.cuda()
        grid = (triton.cdiv(cache.payload, BLOCK), selected, 1)

        def launch(call):
            packed = self.packed[self.rows_of(call, selected)[1] :]
            arguments = (cache.base, packed, table[call], table, cache.rows, cache.page_stride, cache.payload, False, BLOCK)
            gather[grid](*arguments, num_warps=WARPS)

        return launch

    def graph(self, launch, selected):
        """A graph of all calls, whose bytes are checked."""
        calls = self.request["calls"]
        launch(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(calls):
                launch(call)
        self.packed.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        for call in (0, calls - 1):
            rows, first = self.rows_of(call, selected)
            expected = self.cache.states[torch.tensor(rows, device="cuda")]
            if not torch.equal(self.packed[first : first + selected], expected):
                raise AssertionError("A kernel in a graph left wrong bytes")
        return graph

    def measure(self):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

        def elapsed(work):
            events[0].record()
            work()
            events[1].record()
            torch.cuda.synchronize()
            return events[0].elapsed_time(events[1]) * 1e3

        calls, order = self.request["calls"], random.Random(11)
        us = {}
        for selected in self.request["selected"]:
            launches = {"own": self.own(selected), "control": self.own(selected), "triton": self.triton(selected)}
            graphs = {name: self.graph(launch, selected) for name, launch in launches.items()}
            taken = {name: [] for name in graphs}
            for replay in range(self.request["replays"] + 3):
                names = list(graphs)
                order.shuffle(names)
                for name in names:
                    took = elapsed(graphs[name].replay) / calls
                    if replay >= 3:
                        taken[name].append(round(took, 4))
            us[str(selected)] = taken
        self.packed = None
        source = torch.empty(MEMCPY_BYTES, dtype=torch.uint8, device="cuda").fill_(1)
        target = torch.empty_like(source).fill_(2)
        times = [elapsed(lambda: target.copy_(source)) for _ in range(MEMCPY_TIMES + 2)][2:]
        return {"calls": calls, "graph_us": us, "memcpy_bytes": MEMCPY_BYTES, "memcpy_us": times}


class Rival:
    """Answers one request after the other."""

    def __init__(self):
        self.caches, self.cases = {}, {}

    def cache(self, layout):
        key = tuple(sorted(layout.items()))
        if key not in self.caches:
            self.caches[key] = Cache(layout)
        return self.caches[key]

    def answer(self, request):
        ask = request["ask"]
        if ask == "prepare":
            # One case after the other: the outputs of the last one are not needed any more.
            self.cases.clear()
            case = Case(request, self.cache(request["layout"]))
            case.check(request["rows"])
            self.cases[request["case"]] = case
            return {}
        if ask == "time":
            case = self.cases[request["case"]]
            before, timed = case.indices(request["before"]), case.indices(request["rows"])
            case.call(request["path"], before)
            return {"us": case.call(request["path"], timed)}
        if ask == "kernels":
            self.cases.clear()
            return {"kernels": Kernels(request, self.cache(request["layout"])).measure()}
        raise ValueError(f"{ask!r} is no request")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, help="stay on this CPU")
    options = parser.parse_args()
    # What torch or Triton print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    gc.disable()
    facts = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name(),
        "block": str(BLOCK),
        "warps": str(WARPS),
    }
    rival = Rival()
    print(json.dumps({"facts": facts}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = rival.answer(json.loads(line))
        except Exception as error:  # whatever it is, the benchmark tells it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
