#!/usr/bin/env python3
"""The cases of `statecopy.torch` that need a GPU: run by 'tests/device/run python' where there is one.

usage: python_suite.py --statecopyd PATH --kernels STORE --output FOLDER [--commit ID] [--mps with|without] [CASE...]

Each group of cases is a process of its own, because torch's allocator is chosen when it starts: the default one, expandable
segments, cudaMallocAsync. The groups run side by side, each with a daemon of its own. Prints 'ok   NAME  what was seen' or
'FAIL NAME  why' or 'skip NAME  needs what' for each case and 'N ok, N failed, with[out] MPS' last; the exit code is 0 only when
none failed. FOLDER receives python.json and the daemons' logs. Needs torch and the wheel, and nothing else.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ALLOCATORS = {"default": "", "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
CASES = {name: [] for name in ALLOCATORS}
READY_S = 30
WORDS = {True: "ok  ", False: "FAIL", None: "skip"}


def case(*allocators, gpus=1):
    def note(function):
        for allocator in allocators:
            CASES[allocator].append((function, gpus))
        return function

    return note


class Daemon:
    def __init__(self, options, name, device="cuda:0"):
        self.options, self.device, self.directory = options, device, tempfile.mkdtemp(prefix="statecopy-")
        self.address = f"unix://{self.directory}/run/statecopyd.sock"
        self.log = open(Path(options.output) / f"{name}.log", "ab")
        self.start()

    def start(self):
        environment = dict(os.environ, STATECOPY_ARTIFACT_STORES=self.options.kernels)
        environment["STATECOPY_ARTIFACT_STORE"] = f"{self.directory}/written"
        command = [self.options.statecopyd, "serve", "--runtime-dir", f"{self.directory}/run", "--device", self.device]
        self.process = subprocess.Popen([*command, "--http-address", "off"], env=environment, stdout=self.log, stderr=self.log)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=20)


class Bed:
    """A daemon, a client, and the oracle."""

    def __init__(self, options, name):
        import statecopy.torch

        self.options, self.daemon = options, Daemon(options, name)
        self.client = statecopy.torch.connect(self.daemon.address, device="cuda:0", wait_s=READY_S)

    def connect(self, **options):
        """Another client of the same daemon."""
        import statecopy.torch

        return statecopy.torch.connect(self.daemon.address, device="cuda:0", wait_s=READY_S, **options)

    def cache(self, rows=16, payload=(4, 16, 32), dtype=None, gap=64, offset=0):
        """A cache with gaps, all of its bytes random, and the whole memory that it lies in."""
        import torch

        dtype = dtype or torch.float32
        heads, values, keys = payload
        page = heads * values * keys + gap
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        memory = torch.randint(-100, 100, (offset + rows * page,), device="cuda", dtype=bits).view(dtype)
        strides = (page, values * keys, keys, 1)
        return memory.as_strided((rows, *payload), strides, offset), memory

    def plan(self, state, max_selected=256, **options):
        return self.client.register({"layer": state}, max_selected=max_selected, **options)["layer"]


def bits(tensor):
    import torch

    return tensor.contiguous().view(torch.uint8)


def gathered(state, indices, flags=None):
    """What the contract says (Gather)."""
    import torch

    index = indices.long()
    valid = (index >= 0) & (index < state.shape[0])
    packed = state[torch.where(valid, index, 0)].clone()
    if flags is not None:
        valid = valid & flags.reshape(-1).ne(0)
    packed.view(torch.uint8 if packed.dtype.itemsize == 1 else packed.dtype)[~valid] = 0
    return packed


def same(one, other):
    import torch

    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def indices_of(selected, rows, width):
    import torch

    indices = torch.randint(0, rows, (selected,), device="cuda", dtype=width)
    if selected > 4:
        info = torch.iinfo(width)
        indices[:4] = torch.tensor([-1, rows, info.min, info.max], device="cuda", dtype=width)
    return indices


@case("default", "expandable")
def copies_of_every_kind_are_bit_exact(bed):
    import torch

    done = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn):
        state, memory = bed.cache(rows=300, dtype=dtype, offset=48)
        plan = bed.plan(state)
        for selected in (0, 1, 2, 7, 8, 65, 129, 256):
            for width in (torch.int32, torch.int64):
                indices = indices_of(selected, 300, width)
                for flags in (None, torch.rand(selected, device="cuda") > 0.5, torch.randint(0, 3, (selected, 1), device="cuda")):
                    assert same(plan.gather(indices, flags), gathered(state, indices, flags)), (dtype, selected, width)
                    done += 1
                unique = torch.randperm(300, device="cuda")[:selected].to(width)
                packed = torch.randint(0, 99, (selected, *state.shape[1:]), device="cuda").to(dtype)
                wanted = memory.clone()
                wanted.as_strided(state.shape, state.stride(), 48)[unique.long()] = packed
                plan.scatter(packed, unique)
                assert torch.equal(bits(memory), bits(wanted)), ("scatter", dtype, selected, width)
                done += 1
    return f"{done} copies of 6 dtypes"


@case("default", "expandable")
def a_cache_of_several_pieces_is_one_region(bed):
    import torch

    state, _ = bed.cache(rows=64, payload=(12, 128, 128), gap=12 * 128 * 128)
    plan = bed.plan(state)
    indices = torch.arange(63, -1, -1, device="cuda", dtype=torch.int32)
    assert same(plan.gather(indices), gathered(state, indices))
    return f"{state.shape[0] * state.stride(0) * 4 >> 20} MiB"


@case("default")
def pages_past_four_gib_with_int32_indices(bed):
    import torch

    page = (4 << 30) // 4 + 1024
    memory = torch.zeros(3 * page, device="cuda")
    state = memory.as_strided((3, 2, 8, 8), (page, 64, 8, 1))
    for row in range(3):
        state[row] = row + 1
    plan = bed.plan(state)
    indices = torch.tensor([2, 0, 1], device="cuda", dtype=torch.int32)
    assert same(plan.gather(indices), gathered(state, indices))
    bed.client.release()
    return "3 rows of 4 GiB"


@case("default", "expandable")
def indices_are_used_where_they_lie(bed):
    import torch

    state, _ = bed.cache()
    plan = bed.plan(state)
    indices = torch.tensor([3, 1, -1, 5], device="cuda", dtype=torch.int32)
    route = plan.route(indices)
    assert (route.how, route.address) == ("in_place", indices.data_ptr()), route
    before = bed.client.counters()
    wide = torch.arange(16, device="cuda", dtype=torch.int64)
    strided, unaligned = wide[::2], wide[1:5]
    assert same(plan.gather(strided), gathered(state, strided))
    assert same(plan.gather(unaligned), gathered(state, unaligned))
    after = bed.client.counters()
    assert after["normalised"] - before["normalised"] == 2, (before, after)
    assert plan.gather(indices).data_ptr() % 16 == 0
    return "in place at its own address; 2 of 2 others made contiguous"


@case("default")
def a_copy_sees_what_the_current_stream_was_asked_before(bed):
    import torch

    state, _ = bed.cache(rows=64)
    plan = bed.plan(state)
    stream = torch.cuda.Stream()
    for turn in range(100):
        indices = torch.zeros(8, device="cuda", dtype=torch.int32)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            state[turn % 64] = turn
            indices.fill_(turn % 64)
            packed = plan.gather(indices)
            assert bool((packed == turn).all()), turn
    return "100 turns behind a slow kernel"


@case("default")
def a_buffer_is_not_written_while_another_stream_reads_it(bed):
    import torch

    state, _ = bed.cache(rows=2, payload=(12, 128, 128))
    state[0], state[1] = 1, 2
    plan = bed.plan(state)
    ones, twos = (torch.full((8,), row, device="cuda", dtype=torch.int32) for row in (0, 1))
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(one):
            packed = plan.gather(ones)
            torch.cuda._sleep(2_000_000)
            read = packed.sum()
            wanted = packed.numel()
            del packed
        with torch.cuda.stream(other):
            again = plan.gather(twos)
        torch.cuda.synchronize()
        assert float(read) == wanted and bool((again == 2).all())
    return "20 turns"


@case("default")
def results_go_back_to_the_pool_with_their_last_view(bed):
    import torch

    state, _ = bed.cache()
    with bed.connect(completion="host") as client:
        plan = client.register({"layer": state}, max_selected=8)["layer"]
        indices = torch.arange(8, device="cuda", dtype=torch.int32)
        view = plan.gather(indices)[3:4]
        held = client.counters()["pool_bytes_in_use"]
        assert same(view, state[3:4].contiguous())
        del view
        assert client.counters()["pool_bytes_in_use"] < held
        before = client.counters()
        for _ in range(5000):
            plan.gather(indices)
        after = client.counters()
    assert after["pool_misses"] == before["pool_misses"] and after["pool_bytes"] == before["pool_bytes"], (before, after)
    return f"{after['pool_hits']} hits, {after['pool_misses']} misses"


@case("default", "expandable")
def memory_that_came_back_at_an_address_is_known_for_another(bed):
    import torch

    state, memory = bed.cache(rows=16, payload=(8, 64, 64))
    plan = bed.plan(state)
    indices, addresses, again = torch.arange(8, device="cuda", dtype=torch.int32), set(), 0
    for turn in range(12):
        packed = torch.full((8, 8, 64, 64 * (1 + turn % 2)), float(turn), device="cuda")[..., :64].contiguous()
        again += packed.data_ptr() in addresses
        addresses.add(packed.data_ptr())
        plan.scatter(packed, indices)
        assert bool((state[:8] == turn).all()), turn
        del packed
        torch.cuda.empty_cache()
    counters = bed.client.counters()
    return f"{again} of 12 at an address seen before; {counters['regions_registered']} registered, {counters['regions_dropped']} dropped"


@case("default", "expandable")
def after_freeze_new_memory_is_copied_once(bed):
    import torch
    import statecopy.torch

    state, _ = bed.cache()
    with statecopy.torch.connect(bed.daemon.address, device="cuda:0") as client:
        plan = client.register({"layer": state}, max_selected=16)["layer"]
        client.freeze()
        torch.cuda.empty_cache()
        packed = torch.full((8, *state.shape[1:]), 5.0, device="cuda")
        big = torch.zeros(32 << 20, device="cuda", dtype=torch.int32)
        indices = big[:8].copy_(torch.arange(8, device="cuda"))
        plan.scatter(packed, indices)
        assert bool((state[:8] == 5).all())
        assert same(plan.gather(indices), gathered(state, indices))
        counters = client.counters()
        assert counters["operands_copied"] >= 2, counters
        return f"{counters['operands_copied']} operands copied"


@case("default")
def a_final_state_of_another_type_is_converted(bed):
    import torch

    state, _ = bed.cache(dtype=torch.bfloat16)
    plan = bed.plan(state)
    indices = torch.arange(4, device="cuda", dtype=torch.int64)
    final = torch.randn(4, *reversed(state.shape[1:]), device="cuda").permute(0, 3, 2, 1)
    plan.scatter(final, indices)
    assert same(state[:4].contiguous(), final.to(torch.bfloat16).contiguous())
    return "float32 and transposed to bfloat16"


@case("default")
def a_host_completed_copy_is_refused_while_a_graph_is_captured(bed):
    import statecopy
    import torch

    state, _ = bed.cache()
    with bed.connect(completion="host") as client:
        plan = client.register({"layer": state}, max_selected=8)["layer"]
        indices = torch.arange(4, device="cuda", dtype=torch.int32)
        one = torch.ones(4, device="cuda")
        graph, said = torch.cuda.CUDAGraph(), ""
        with torch.cuda.graph(graph):
            one.add_(1)
            try:
                plan.gather(indices)
            except statecopy.Error as error:
                said = str(error)
        assert "captured" in said, said
        graph.replay()
        assert float(one[0]) == 2 and same(plan.gather(indices), gathered(state, indices))
    return "refused; the capture went on"


@case("default")
def compiled_code_copies_by_operators(bed):
    import statecopy.torch
    import torch

    state, _ = bed.cache()
    plan = bed.plan(state)

    def step(state, indices, flags):
        packed = plan.gather(indices, flags)
        plan.scatter(packed * 2, indices)
        return packed

    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=True)
    with statecopy.torch.forward_context({"layer": plan}):
        for selected in (4, 1, 0, 7):
            indices = torch.arange(selected, device="cuda", dtype=torch.int32)
            flags = torch.ones(selected, device="cuda", dtype=torch.bool)
            state.fill_(3)
            assert bool((compiled(state, indices, flags) == 3).all())
            assert bool((state[:selected] == 6).all()) and bool((state[selected:] == 3).all())
    return "counts 4, 1, 0, 7"


@case("default")
def what_does_not_fit_is_refused_before_anything_moves(bed):
    import statecopy
    import torch

    state, memory = bed.cache()
    plan, before = bed.plan(state, max_selected=8), memory.clone()
    indices = torch.arange(4, device="cuda", dtype=torch.int32)
    packed = torch.zeros(4, *state.shape[1:], device="cuda")
    freed = torch.zeros(4, *state.shape[1:], device="cuda")
    freed.untyped_storage().resize_(0)
    wrong = {
        "indices on the host": lambda: plan.gather(indices.cpu()),
        "float indices": lambda: plan.gather(indices.float()),
        "too many rows": lambda: plan.gather(torch.zeros(9, device="cuda", dtype=torch.int32)),
        "flags of another length": lambda: plan.gather(indices, torch.ones(3, device="cuda")[:0].bool()),
        "packed on the host": lambda: plan.scatter(packed.cpu(), indices),
        "packed one row short": lambda: plan.scatter(packed[:3], indices),
        "packed that was freed": lambda: plan.scatter(freed, indices),
        "a cache on the host": lambda: bed.client.register({"x": state.cpu()}, max_selected=1),
    }
    for name, call in wrong.items():
        try:
            call()
        except statecopy.ArgumentError as error:
            assert error.about and error.remedy, (name, error)
        else:
            raise AssertionError(f"{name} was taken")
    assert torch.equal(bits(memory), bits(before))
    return f"{len(wrong)} of {len(wrong)} refused"


@case("default", "expandable")
def sleep_frees_the_memory_and_wake_rebinds(bed):
    import torch

    rows = 256
    state, memory = bed.cache(rows=rows, payload=(12, 128, 128))
    plan = bed.plan(state)
    torch.cuda.synchronize()
    held = torch.cuda.mem_get_info()[0]
    bed.client.release()
    del state, memory
    torch.cuda.empty_cache()
    freed = torch.cuda.mem_get_info()[0] - held
    assert freed > rows * 12 * 128 * 128 * 4 * 0.9, freed
    state, memory = bed.cache(rows=rows, payload=(12, 128, 128))
    bed.client.rebind({"layer": state})
    indices = torch.arange(8, device="cuda", dtype=torch.int32)
    assert same(plan.gather(indices), gathered(state, indices))
    return f"{freed >> 20} MiB came back"


@case("default")
def a_killed_daemon_is_gone_loudly_and_the_next_one_is_found(bed):
    import statecopy
    import statecopy.torch
    import torch

    daemon = Daemon(bed.options, "killed")
    state, _ = bed.cache()
    client = statecopy.torch.connect(daemon.address, device="cuda:0", wait_s=READY_S, timeout_s=3)
    local = statecopy.torch.connect(daemon.address, device="cuda:0", on_unavailable="local", timeout_s=3)
    plan = client.register({"layer": state}, max_selected=8)["layer"]
    other = local.register({"layer": state}, max_selected=8)["layer"]
    indices = torch.tensor([3, -1, 5], device="cuda", dtype=torch.int32)
    assert same(plan.gather(indices), gathered(state, indices))
    daemon.kill()
    assert same(other.gather(indices), gathered(state, indices))
    assert local.counters()["local_gathers"] == 1
    try:
        plan.gather(indices, timeout_s=1)
    except statecopy.Unavailable:
        pass
    else:
        raise AssertionError("a killed daemon answered")
    daemon.start()
    started = time.monotonic()
    while True:
        with contextlib.suppress(statecopy.Error):
            assert same(plan.gather(indices), gathered(state, indices))
            break
        assert time.monotonic() - started < READY_S
    took = time.monotonic() - started
    client.close()
    local.close()
    daemon.stop()
    return f"back {took:.1f} s after the start of the next"


@case("default")
def layers_of_an_engine_get_their_plans(bed):
    import torch
    from statecopy import vllm

    class Layer:
        _requires_kda_state_copy = True

    layers = {f"model.layers.{at}": Layer() for at in range(3)}
    for layer in layers.values():
        state, _ = bed.cache(gap=0)
        layer.kv_cache = (torch.zeros(1, device="cuda"), state)
    with contextlib.closing(vllm.initialize_state_copy(layers, 8, address=bed.daemon.address)):
        indices = torch.tensor([2, 0], device="cuda", dtype=torch.int32)
        flags = torch.tensor([True, False], device="cuda")
        for layer in layers.values():
            state = layer.kv_cache[1]
            packed = layer._ascend_kda_state_copy.gather(state, indices, flags)
            assert same(packed, gathered(state, indices, flags))
            layer._ascend_kda_state_copy.scatter(state, packed, indices)
    return "3 layers"


@case("default")
def a_prefill_through_the_daemon_equals_one_without(bed):
    example = bed.options.example
    results = []
    for extra in ([], ["--plain"]):
        environment = dict(os.environ, STATECOPY_ADDR=bed.daemon.address)
        command = [sys.executable, example, "--device", "cuda", "--json", *extra]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr[-800:]
        results.append(json.loads(done.stdout))
    ours, plain = results
    for name in ("outputs_sha256", "cache_sha256"):
        assert ours[name] == plain[name], (ours, plain)
    return "output and cache equal, bit for bit"


# What keeps a stream busy for some tens of milliseconds.
SLEEP_CYCLES = 50_000_000


@case("default", "expandable")
def a_call_returns_while_its_stream_is_busy_and_what_follows_finds_the_bytes(bed):
    import torch

    state, _ = bed.cache(rows=64)
    plan = bed.plan(state)
    indices = torch.arange(8, device="cuda", dtype=torch.int32)
    packed = torch.empty(8, *state.shape[1:], device="cuda")
    plan.gather(indices)
    plan.scatter(packed, indices)
    torch.cuda.synchronize()
    busy, stream = 0, torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(20):
            torch.cuda._sleep(SLEEP_CYCLES)
            packed.fill_(turn)
            plan.scatter(packed, indices)
            doubled = plan.gather(indices) * 2
            busy += not stream.query()
            assert bool((doubled == 2 * turn).all()), turn
    bed.client.check()
    return f"still busy after {busy} of 20 calls"


@case("default")
def streams_and_threads_each_keep_their_own_order(bed):
    import threading

    import torch

    state, _ = bed.cache(rows=64)
    plan, failed = bed.plan(state), []

    def work(row):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                indices = torch.full((1,), row, device="cuda", dtype=torch.int32)
                for turn in range(200):
                    packed = torch.full((1, *state.shape[1:]), float(row * 1000 + turn), device="cuda")
                    plan.scatter(packed, indices)
                    assert turn % 50 or bool((plan.gather(indices) == row * 1000 + turn).all()), (row, turn)
        except BaseException as error:
            failed.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    bed.client.check()
    return "8 streams of 8 threads, 200 scatters each"


@case("default")
def a_stream_may_be_as_far_ahead_as_its_lane_is_long_and_further(bed):
    import torch

    state, _ = bed.cache(rows=64)
    plan = bed.plan(state)
    rows = [torch.full((1,), row, device="cuda", dtype=torch.int32) for row in range(64)]
    torch.cuda._sleep(SLEEP_CYCLES)
    results = [plan.gather(rows[turn % 64]) for turn in range(3000)]
    for turn, result in enumerate(results):
        assert turn % 97 or same(result, state[turn % 64 :][:1].contiguous()), turn
    bed.client.check()
    return "3000 gathers in one go"


@case("default")
def lists_are_read_when_their_turn_has_come_and_refusals_leave_the_stream_usable(bed):
    import statecopy
    import torch

    state, _ = bed.cache()
    plan = bed.plan(state, max_selected=8)
    torch.cuda._sleep(SLEEP_CYCLES)
    packed = plan.gather([3, -1, 5], [True, True, False])
    said = []
    inside = torch.as_strided(state, (2, 4, 16, 32), (2048, 512, 32, 1))
    for wrong in (lambda: plan.gather(list(range(9))), lambda: plan.scatter(inside, [0, 1]), lambda: plan.gather([1], lane=2)):
        try:
            wrong()
        except statecopy.ArgumentError as error:
            said.append(error.code or error.about)
    assert said == ["SELECTED_TOO_LARGE", "OVERLAP", "lane"], said
    indices = torch.tensor([3, -1, 5], device="cuda")
    assert same(packed, gathered(state, indices, torch.tensor([True, True, False], device="cuda")))
    bed.client.check()
    return ", ".join(said)


@case("default")
def pooled_buffers_change_streams_in_order(bed):
    import torch

    state, _ = bed.cache(rows=2, payload=(12, 128, 128))
    state[0], state[1] = 1, 2
    # Results of 12 MiB have memory of their own, which is not registered any more; the pool has room for one.
    with bed.connect(pool_bytes_max=16 << 20) as client:
        plan = client.register({"layer": state}, max_selected=16)["layer"]
        ones, twos = (torch.full((16,), row, device="cuda", dtype=torch.int32) for row in (0, 1))
        for indices in (ones, twos):
            plan.scatter(state[:1].clone(), indices[:1].clone())
            plan.gather(indices[:1])
        state[0], state[1] = 1, 2
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        client.freeze()
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        for _ in range(20):
            with torch.cuda.stream(one):
                packed = plan.gather(ones)
                torch.cuda._sleep(2_000_000)
                read, wanted = packed.sum(), packed.numel()
                del packed
            with torch.cuda.stream(other):
                again = plan.gather(twos)
            torch.cuda.synchronize()
            assert float(read) == wanted and bool((again == 2).all())
            del again
        client.check()
        counters = client.counters()
    assert counters["pool_hits"] >= 30, counters
    return f"{counters['pool_hits']} hits, {counters['pool_misses']} misses of {counters['pool_bytes'] >> 20} MiB"


def captured(step):
    """A graph of a step, which is run before as torch wants it."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@case("default", "expandable")
def a_captured_step_copies_at_every_replay(bed):
    import torch

    state, _ = bed.cache(rows=64)
    plan = bed.plan(state)
    indices = torch.zeros(4, device="cuda", dtype=torch.int32)
    flags = torch.ones(4, device="cuda", dtype=torch.bool)

    def step():
        packed = plan.gather(indices, flags)
        plan.scatter(packed + 1, indices)
        return packed

    graph, packed = captured(step)
    for turn in range(200):
        indices.copy_(torch.randperm(64, device="cuda")[:4])
        flags.copy_(torch.rand(4, device="cuda") > 0.3)
        before = state.clone()
        graph.replay()
        wanted = gathered(before, indices, flags)
        assert same(packed, wanted), turn
        before[indices.long()] = wanted + 1
        # Bits: some of these are no numbers.
        assert same(state, before), turn
    bed.client.check()
    return "200 replays"


@case("default")
def graphs_of_several_sizes_share_their_memory_and_copy_sets_of_layers(bed):
    import torch

    states = {name: bed.cache(rows=64)[0] for name in ("a", "b", "c")}
    plans = bed.client.register(states, max_selected=16, sets={"all": list(states)})
    plan, graphs, pool = plans.sets["all"], [], None
    for selected in (16, 4, 1):
        indices = torch.zeros(selected, device="cuda", dtype=torch.int64)

        def step(indices=indices):
            packed = plan.gather_all(indices)
            for _ in range(3):
                plan.scatter_all(packed * 2, indices)
                packed = plan.gather_all(indices)
            return packed

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            packed = step()
        pool = graph.pool()
        graphs.append((graph, indices, packed))
    for turn in range(30):
        graph, indices, packed = graphs[turn % 3]
        indices.copy_(torch.randperm(64, device="cuda")[: len(indices)])
        for state in states.values():
            state.fill_(turn + 1)
        graph.replay()
        assert bool((packed == 8 * (turn + 1)).all()), turn
        for state in states.values():
            assert bool((state[indices] == 8 * (turn + 1)).all()), turn
    bed.client.check()
    return "3 graphs, 30 replays"


@case("default")
def compiled_code_is_captured(bed):
    import statecopy.torch
    import torch

    state, _ = bed.cache(rows=64)
    plan = bed.plan(state)
    indices, flags = torch.zeros(4, device="cuda", dtype=torch.int32), torch.ones(4, device="cuda", dtype=torch.bool)

    def step(state, indices, flags):
        packed = plan.gather(indices, flags)
        plan.scatter(packed * 2, indices)
        return packed

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    with statecopy.torch.forward_context({"layer": plan}):
        graph, packed = captured(lambda: compiled(state, indices, flags))
    for turn in range(20):
        indices.copy_(torch.randperm(64, device="cuda")[:4])
        state.fill_(turn + 1)
        graph.replay()
        assert bool((packed == turn + 1).all()), turn
        assert bool((state[indices.long()] == 2 * (turn + 1)).all()), turn
    bed.client.check()
    return "20 replays"


@case("default")
def a_capture_goes_on_while_other_threads_copy(bed):
    import threading

    import torch

    state, _ = bed.cache(rows=64)
    plan, failed, ready, over, copies = bed.plan(state), [], threading.Event(), threading.Event(), [0]
    indices = torch.arange(4, device="cuda", dtype=torch.int32)
    torch.cuda.synchronize()

    def work():
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                packed = torch.empty(4, *state.shape[1:], device="cuda")
                while not over.is_set():
                    plan.gather(indices, out=packed)
                    plan.scatter(packed, indices)
                    copies[0] += 1
                    ready.set()
        except BaseException as error:
            failed.append(error)
            ready.set()

    graph, one = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    plan.gather(indices)
    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(READY_S)
    before = copies[0]
    try:
        with torch.cuda.graph(graph):
            one.add_(1)
            packed = plan.gather(indices)
            deadline = time.monotonic() + READY_S
            while copies[0] < before + 200 and not failed and time.monotonic() < deadline:
                time.sleep(0.001)
            one.add_(1)
    finally:
        over.set()
        thread.join()
    assert not failed, failed
    graph.replay()
    assert float(one[0]) == 2 and same(packed, gathered(state, indices))
    bed.client.check()
    return f"{copies[0] - before} pairs of copies during the capture"


@case("default")
def a_graph_outlives_sleep_and_says_when_its_layer_is_gone(bed):
    import statecopy
    import torch

    # As large as caches are: torch gives it a segment of its own, which goes without the graph's operands.
    payload = (12, 128, 128)
    state, _ = bed.cache(rows=64, payload=payload)
    with bed.connect() as client:
        plan = client.register({"layer": state}, max_selected=8)["layer"]
        indices = torch.arange(4, device="cuda", dtype=torch.int32)
        graph, packed = captured(lambda: plan.gather(indices))
        torch.cuda.synchronize()
        client.release()
        other, _ = bed.cache(rows=64, payload=payload)
        client.rebind({"layer": other})
        graph.replay()
        assert same(packed, gathered(other, indices))
        client.check()
        client.release()
        graph.replay()
        torch.cuda.synchronize()
        try:
            client.check()
        except statecopy.Error as error:
            assert error.about == "graph" and error.leaves == "unknown", error
            said = error.code
        else:
            raise AssertionError("nothing was said of a layer that is gone")
        del graph, packed
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(statecopy.Error):
                client.check()
                break
            assert time.monotonic() < deadline, "the graph is not gone"
        client.rebind({"layer": other})
        assert same(plan.gather(indices), gathered(other, indices))
    return said


@case("default")
def what_a_graph_has_of_the_pool_is_its_own(bed):
    import torch

    state, _ = bed.cache(rows=64, payload=(12, 128, 128))
    with bed.connect() as client:
        plan = client.register({"layer": state}, max_selected=16)["layer"]
        indices = torch.arange(16, device="cuda", dtype=torch.int32)
        plan.gather(indices[:1])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        client.freeze()
        total = torch.zeros((), device="cuda", dtype=torch.float64)
        graph, _ = captured(lambda: total.copy_(plan.gather(indices).double().sum()))
        for turn in range(20):
            others = [plan.gather(indices) for _ in range(4)]
            state.fill_(turn)
            graph.replay()
            assert float(total) == turn * 16 * state[0].numel(), turn
            del others
        client.check()
        counters = client.counters()
        assert counters["pool_buffers"] >= 5, counters
        return f"{counters['pool_buffers']} buffers"


@case("default")
def a_daemon_that_dies_frees_waiting_streams_and_the_loss_is_raised(bed):
    import statecopy
    import statecopy.torch
    import torch

    daemon = Daemon(bed.options, "dies")
    state, _ = bed.cache()
    client = statecopy.torch.connect(daemon.address, device="cuda:0", wait_s=READY_S, timeout_s=5)
    plan = client.register({"layer": state}, max_selected=8)["layer"]
    indices = torch.arange(4, device="cuda", dtype=torch.int32)
    stream, resting = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(resting):
        plan.gather(indices)
    with torch.cuda.stream(stream):
        plan.gather(indices)
        torch.cuda.synchronize()
        torch.cuda._sleep(10 * SLEEP_CYCLES)
        plan.gather(indices)
    daemon.kill()
    stream.synchronize()
    said = []
    with torch.cuda.stream(stream):
        for call in (client.check, lambda: plan.gather(indices), client.check):
            try:
                call()
            except statecopy.Error as error:
                said.append((error.about, error.leaves))
    assert said == [("stream", "unknown")] * 3, said
    daemon.start()
    deadline = time.monotonic() + READY_S
    with torch.cuda.stream(resting):
        while True:
            with contextlib.suppress(statecopy.Error):
                assert same(plan.gather(indices), gathered(state, indices))
                break
            assert time.monotonic() < deadline, "the next daemon is not found"
    client.reset_lanes()
    with torch.cuda.stream(stream):
        assert same(plan.gather(indices), gathered(state, indices))
    client.check()
    client.close()
    daemon.stop()
    return "the lost stream raised three times, the other went on"


@case("async")
def memory_of_a_stream_ordered_pool_is_refused_by_name(bed):
    import statecopy
    import torch

    state = torch.zeros(8, 1, 8, 8, device="cuda")
    try:
        bed.plan(state)
    except statecopy.HandleError as error:
        assert error.code == "HANDLE_UNSUPPORTED" and "cudaMallocAsync" in str(error), error
        return str(error)[:100]
    raise AssertionError("it was registered")


def code_of(call):
    """The code that a call is refused with."""
    import statecopy

    try:
        call()
    except statecopy.Error as error:
        return error.code
    raise AssertionError("it was not refused")


@case("default", gpus=2)
def another_gpu_has_a_daemon_and_an_order_of_its_own(bed):
    import torch

    import statecopy.torch

    # The current device is the first, but where a stream of the second is entered.
    assert torch.cuda.current_device() == 0
    first, _ = bed.cache(rows=64)
    first_plan, indices = bed.plan(first), torch.randperm(64, device="cuda:1")[:32]
    daemon = Daemon(bed.options, "second", "cuda:1")
    try:
        with statecopy.torch.connect(daemon.address, device="cuda:1", wait_s=READY_S) as client:
            second = torch.randn(64, 4, 16, 32, device="cuda:1")
            plan = client.register({"layer": second}, max_selected=64)["layer"]
            for turn in range(50):
                torch.cuda._sleep(1_000_000)
                with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
                    torch.cuda._sleep(1_000_000)
                    second.add_(1)
                    packed = plan.gather(indices).mul_(2)
                    expected = second[indices] * 2
                    torch.cuda.current_stream().synchronize()
                assert same(packed, expected), f"turn {turn}"
                assert same(plan.gather(indices), second[indices]), f"turn {turn}, the default stream"
                assert same(first_plan.gather(indices.to("cuda:0")), first[indices.to("cuda:0")]), f"turn {turn}"
            graph = torch.cuda.CUDAGraph()
            # Torch's own capture stream is one for the process, of the device that was captured first.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream("cuda:1")):
                packed = plan.gather(indices)
            for _ in range(20):
                second.add_(1)
                graph.replay()
                assert same(packed, second[indices])
            client.check()
            elsewhere = {
                "indices": lambda: plan.gather(indices.to("cuda:0")),
                "flags": lambda: plan.gather(indices, torch.ones(32, dtype=torch.bool, device="cuda:0")),
                "packed": lambda: plan.scatter(packed.to("cuda:0"), indices),
                "states": lambda: client.register({"other": first}, max_selected=4),
            }
            codes = {what: code_of(call) for what, call in elsewhere.items()}
            assert set(codes.values()) == {"DEVICE_NOT_VISIBLE"}, codes
            code = code_of(lambda: statecopy.torch.connect(daemon.address, device="cuda:0"))
            assert code == "DEVICE_NOT_VISIBLE", code
            assert same(plan.gather(indices), second[indices]), "after what was refused"
    finally:
        daemon.stop()
    return "50 turns on 3 streams of 2 GPUs, 20 replays, 5 refusals"


def run_group(options):
    import torch

    bed, verdicts = Bed(options, options.group), []
    for function, gpus in CASES[options.group]:
        name = f"{options.group}::{function.__name__}"
        if options.cases and not any(part in name for part in options.cases):
            continue
        started = time.monotonic()
        try:
            if torch.cuda.device_count() < gpus:
                seen, ok = f"needs {gpus} GPUs", None
            else:
                seen, ok = function(bed), True
        except Exception:
            seen, ok = traceback.format_exc(), False
        verdicts.append({"case": name, "ok": ok, "seen": seen, "seconds": round(time.monotonic() - started, 2)})
        Path(options.output, f"{options.group}.verdicts").write_text(json.dumps(verdicts))
    bed.client.close()
    bed.daemon.stop()


def start_group(options, group):
    environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=ALLOCATORS[group])
    if not ALLOCATORS[group]:
        del environment["PYTORCH_CUDA_ALLOC_CONF"]
    command = [sys.executable, __file__, "--group", group, *sys.argv[1:]]
    return subprocess.Popen(command, env=environment)


def verdicts_of(options, groups):
    verdicts = []
    for group, process in groups.items():
        code = process.wait()
        file = Path(options.output, f"{group}.verdicts")
        verdicts += json.loads(file.read_text()) if file.exists() else []
        file.unlink(missing_ok=True)
        if code:
            verdicts.append({"case": f"{group}::ends", "ok": False, "seen": f"exit code {code}", "seconds": 0})
    return verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--statecopyd", required=True)
    parser.add_argument("--kernels", required=True)
    parser.add_argument("--example", required=True, help="client/python/examples/prefill.py")
    parser.add_argument("--output", required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--mps", choices=("with", "without"), default="without", help="how this process was started")
    parser.add_argument("--group", choices=ALLOCATORS, help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    Path(options.output).mkdir(parents=True, exist_ok=True)
    if options.group:
        return run_group(options)
    verdicts = verdicts_of(options, {group: start_group(options, group) for group in ALLOCATORS})
    for verdict in verdicts:
        seen = "\n" + verdict["seen"] if verdict["ok"] is False else verdict["seen"]
        print(f"{WORDS[verdict['ok']]} {verdict['case']}  {seen} ({verdict['seconds']} s)")
    passed, failed = (sum(verdict["ok"] is what for verdict in verdicts) for what in (True, False))
    report = {"commit": options.commit, "mps": options.mps == "with", "verdicts": verdicts}
    Path(options.output, "python.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{passed} ok, {failed} failed, {options.mps} MPS")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
