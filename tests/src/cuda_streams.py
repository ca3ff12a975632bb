"""A worker in Python whose copies are in the order of its CUDA streams, over the stub driver: no torch, hooks of its own.

Run by tests/tests/python_cuda.rs, which is told on the standard output to do things with the daemon ("! kill", "! start") and
answers each with a line. Prints the name of each case that holds, and ends with 1 at the first that does not.
"""

import array
import ctypes
import math
import os
import random
import sys
import threading
import time

import statecopy
from cuda_tensors import FLOAT, INT, UINT, Managed, Memory, call, driver, enter, pythonapi, read
from statecopy import _core

ROWS, PAYLOAD = 12, 2 * 3 * 8
ROW_BYTES = PAYLOAD * 4
PATIENCE_S = 20
NON_BLOCKING = 1
GEQ, PINNED = 0, 4096
rng = random.Random(11)


class Stream:
    """A stream, and a gate that holds what comes behind it."""

    def __init__(self):
        self.handle = ctypes.c_void_p()
        call("cuStreamCreateWithPriority", ctypes.byref(self.handle), NON_BLOCKING, 0)
        self.pinned, self.used = ctypes.c_void_p(), 64
        call("cuMemHostAlloc", ctypes.byref(self.pinned), ctypes.c_size_t(PINNED), 2)
        self.place, self.turn = ctypes.c_uint64(), 0
        call("cuMemHostGetDevicePointer_v2", ctypes.byref(self.place), self.pinned, 0)
        self.word, self.is_captured = ctypes.c_uint64.from_address(self.pinned.value), False

    def hold(self):
        self.turn += 1
        call("cuStreamWaitValue64_v2", self.handle, self.place, ctypes.c_uint64(self.turn), GEQ)

    def go_on(self):
        self.word.value = self.turn

    def write(self, memory, data, at=0):
        """In the stream's order."""
        source, self.used = self.pinned.value + self.used, self.used + (len(data) + 63) // 64 * 64
        assert self.used <= PINNED
        ctypes.memmove(source, bytes(data), len(data))
        target, nbytes = ctypes.c_uint64(memory.address + at), ctypes.c_size_t(len(data))
        call("cuMemcpyHtoDAsync_v2", target, ctypes.c_void_p(source), nbytes, self.handle)

    def synchronise(self):
        call("cuStreamSynchronize", self.handle)

    def is_done_within(self, seconds):
        deadline = time.monotonic() + seconds
        while driver.cuStreamQuery(self.handle) != 0:
            if time.monotonic() >= deadline:
                return False
        return True

    def capture(self, copies):
        """A graph of what `copies` asks of the stream, and what `copies` gives."""
        call("cuStreamBeginCapture_v2", self.handle, 0)
        self.is_captured = True
        given = copies()
        self.is_captured = False
        graph = ctypes.c_void_p()
        call("cuStreamEndCapture", self.handle, ctypes.byref(graph))
        return Graph(graph), given


class Graph:
    """A captured graph, ready to be replayed."""

    def __init__(self, graph):
        self.graph, self.ready = graph, ctypes.c_void_p()
        call("cuGraphInstantiateWithFlags", ctypes.byref(self.ready), graph, ctypes.c_uint64(0))

    def replay(self, stream):
        call("cuGraphLaunch", self.ready, stream.handle)

    def end(self):
        call("cuGraphExecDestroy", self.ready)
        call("cuGraphDestroy", self.graph)


class Made:
    """What a gather gives, as torch's tensors are asked."""

    def __init__(self, view):
        self.view = view

    def data_ptr(self):
        return self.view.address

    def __getattr__(self, name):
        return getattr(self.view, name)


class Hooks:
    """What statecopy.torch does with torch. Tensors lie one behind the other in one allocation, and are never freed."""

    def __init__(self, pooled=False):
        self.local, self.pooled = threading.local(), pooled
        self.memory, self.used = Memory(32 << 20, pooled), 0
        self.lock, self.kept, self.made = threading.Lock(), [], 0

    def use(self, stream):
        self.local.stream = stream
        return stream

    def stream(self):
        return self.local.stream.handle.value

    def room(self, nbytes):
        with self.lock:
            at, self.used = self.used, self.used + (nbytes + 255) // 256 * 256
            assert self.used <= self.memory.nbytes
            return at

    def maker(self, dtype):
        assert dtype == "float32", dtype

        def make(shape):
            self.made += 1
            return Made(self.memory.view(shape, offset=self.room(4 * math.prod(shape))))

        return make

    def upload(self, role, values):
        form, code, bits = ("b", UINT, 8) if role == "flags" else ("q", INT, 64)
        data = array.array(form, values).tobytes()
        at = self.room(len(data))
        self.local.stream.write(self.memory, data, at)
        return self.memory.view((len(values),), offset=at, code=code, bits=bits)

    def stage(self, into, tensor):
        if tensor.shape[0]:
            # Not as torch does it, but in the same order.
            stream = self.local.stream
            if not stream.is_captured:
                stream.synchronise()
            stream.write(into, read(tensor.address, ROW_BYTES * tensor.shape[0] if len(tensor.shape) > 1 else 8))

    def wrap(self, capsule):
        self.kept.append(capsule)
        managed = ctypes.cast(pythonapi.PyCapsule_GetPointer(capsule, b"dltensor"), ctypes.POINTER(Managed))
        tensor = managed.contents.tensor
        return Wrapped(tensor.data, tensor.shape[: tensor.ndim])


class Wrapped:
    """A result that lies in the client's pool."""

    def __init__(self, address, shape=()):
        self.address, self.shape = address, shape


class Bed:
    """A cache whose row r is filled with r + 1, a client, and vectors of indices."""

    def __init__(self, completion="stream", pooled=False, **options):
        self.hooks = Hooks(pooled)
        self.memory = Memory(ROWS * ROW_BYTES)
        self.fill()
        self.cache = self.memory.view((ROWS, 2, 3, 8))
        self.client = statecopy._client.Client(_core.connect(hooks=self.hooks, completion=completion, **options))
        self.plan = self.register()
        self.vectors = Memory(ROWS * 256)
        for row in range(ROWS):
            self.vectors.write(array.array("i", [row, (row + 1) % ROWS]), row * 256)

    def register(self):
        return self.client.register({"layer": self.cache}, max_selected=8)["layer"]

    def fill(self):
        self.memory.write(b"".join(bytes([row + 1]) * ROW_BYTES for row in range(ROWS)))

    def rows(self, row, count=1):
        return self.vectors.view((count,), offset=row * 256, code=INT)

    def packed(self, byte, count=1):
        memory = Memory(count * ROW_BYTES)
        memory.write(bytes([byte]) * memory.nbytes)
        return memory.view((count, 2, 3, 8))

    def row(self, at):
        return set(read(self.memory.address + at * ROW_BYTES, ROW_BYTES))


def holds(result, *rows):
    """Whether a result is so many whole rows, each of one byte."""
    return read(result.address, len(rows) * ROW_BYTES) == b"".join(bytes([row]) * ROW_BYTES for row in rows)


def raised(family, copy):
    try:
        copy()
    except family as error:
        return error
    raise AssertionError(f"no {family.__name__} was raised")


def until(what, ask):
    deadline = time.monotonic() + PATIENCE_S
    while not ask():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.005)


def tell(what):
    print(f"! {what}", flush=True)
    assert sys.stdin.readline(), "the test went away"


def held(name):
    print(name, flush=True)


enter()
bed = Bed(reconnect_s=0.2)
plan, hooks = bed.plan, bed.hooks
assert bed.client.info()["completion"] == "stream"

stream = hooks.use(Stream())
stream.hold()
stream.write(bed.memory, b"\x63" * ROW_BYTES, 3 * ROW_BYTES)
result = plan.gather(bed.rows(3, 2))
assert not holds(result, 99, 5), "it cannot be there yet"
stream.go_on()
stream.synchronise()
assert holds(result, 99, 5), read(result.address, 8)
held("a gather returns at once, and comes behind what its stream was asked before")

stream.hold()
packed = bed.packed(77)
plan.scatter(packed, bed.rows(3))
again = plan.gather(bed.rows(3))
assert bed.row(3) == {99}
stream.go_on()
stream.synchronise()
assert bed.row(3) == {77} and holds(again, 77)
held("a scatter comes before what its stream is asked after it")

other = Stream()
stream.hold()
late = plan.gather(bed.rows(1))
hooks.use(other)
early = plan.gather(bed.rows(2))
other.synchronise()
assert holds(early, 3) and not holds(late, 2)
stream.go_on()
stream.synchronise()
assert holds(late, 2)
held("streams do not wait for each other")

stream = hooks.use(Stream())
stream.hold()
listed = plan.gather([4, -1, 5], [True, True, False])
stream.go_on()
stream.synchronise()
assert holds(listed, 5, 0, 0)
assert (plan.route([4]).how, plan.route(bed.rows(4)).how) == ("copied", "in_place")
held("values of the host are there when their turn has come")

for none in ([], bed.rows(0, 0)):
    plan.gather(none, [])
    plan.scatter(bed.packed(1).memory.view((0, 2, 3, 8)), none)
stream.synchronise()
held("copies of no rows are copies")

error = raised(statecopy.ArgumentError, lambda: plan.scatter(bed.packed(1, 2), bed.rows(1)))
assert error.code == "PACKED_MISMATCH", error
overlapping = bed.memory.view((1, 2, 3, 8))
error = raised(statecopy.ArgumentError, lambda: plan.scatter(overlapping, bed.rows(1)))
assert error.code == "OVERLAP" and error.leaves == "nothing_moved", (error.code, error.leaves)
error = raised(statecopy.ArgumentError, lambda: plan.gather(bed.rows(1), lane=3))
assert error.about == "lane", error
result = plan.gather(bed.rows(6))
stream.synchronise()
assert holds(result, 7)
bed.client.check()
held("a refusal raises, and its stream goes on")

given = Memory(ROW_BYTES).view((1, 2, 3, 8))
assert plan.gather(bed.rows(8), out=given) is given
pending = plan.submit_gather(bed.rows(9))
waited = pending.wait()
assert holds(waited, 10)
stream.synchronise()
assert holds(given, 9)
held("results go where they are wanted, and what is submitted is waited for by the host")

stream = hooks.use(Stream())
failures, results = [], {}


def worker(number):
    try:
        enter()
        hooks.use(stream)
        results[number] = [(turn % ROWS, plan.gather(bed.rows(turn % ROWS))) for turn in range(number, number + 100)]
    except BaseException as error:
        failures.append(error)


bed.fill()
threads = [threading.Thread(target=worker, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
stream.synchronise()
assert all(holds(result, row + 1) for some in results.values() for row, result in some)
held("threads take turns on one stream")

streams = [Stream() for _ in range(70)]
for number, stream in enumerate(streams):
    hooks.use(stream)
    result = plan.gather(bed.rows(number % ROWS))
    stream.synchronise()
    assert holds(result, number % ROWS + 1)
for stream in streams[:64]:
    hooks.use(stream)
    stream.hold()
    plan.gather(bed.rows(0))
hooks.use(streams[64])
error = raised(statecopy.CapacityError, lambda: plan.gather(bed.rows(0)))
assert error.code == "QUOTA_EXCEEDED", error
for stream in streams[:64]:
    stream.go_on()
    stream.synchronise()
until("a lane is at rest", lambda: bed.client.check() is None)
result = plan.gather(bed.rows(5))
streams[64].synchronise()
assert holds(result, 6)
held("streams whose copies are done give their lanes to others")

stream = hooks.use(Stream())
stream.hold()
plan.scatter(bed.packed(55), bed.rows(7))
opener = threading.Timer(0.2, stream.go_on)
opener.start()
bed.client.release()
assert bed.row(7) == {55}
error = raised(statecopy.HandleError, lambda: plan.gather(bed.rows(7)))
assert error.code == "REGION_UNKNOWN", error
bed.client.check()
bed.client.rebind({"layer": bed.cache})
result = plan.gather(bed.rows(7))
stream.synchronise()
assert holds(result, 55)
held("memory is given up once the copies that were put on streams are made")

lost = Bed(pooled=True)
stream = lost.hooks.use(Stream())
result = lost.plan.gather(lost.rows(3))
stream.synchronise()
assert holds(result, 4) and lost.client.counters()["pool_bytes_in_use"] > 0
again = lost.plan.gather(lost.rows(4))
assert lost.hooks.made == 1, "its memory is not tried again"
held("results lie in the pool where the library's own memory cannot be shared")

frozen = Bed()
stream = frozen.hooks.use(Stream())
frozen.plan.gather(frozen.rows(0))
frozen.client.freeze()
out = Memory(ROW_BYTES).view((1, 2, 3, 8))
frozen.plan.scatter(frozen.packed(33), frozen.rows(1))
assert frozen.plan.gather(frozen.rows(1), out=out) is out
stream.synchronise()
assert frozen.row(1) == {33} and holds(out, 33)
counters = frozen.client.counters()
assert counters["operands_copied"] == 2, counters
unknown = Memory(64)
unknown.write(array.array("i", [1, 2]))
rows, few = unknown.view((2,), code=INT), frozen.vectors.view((1,), code=UINT, bits=8)
frozen.hooks.kept.clear()
held_before = frozen.client.counters()["pool_bytes_in_use"]
graph, error = stream.capture(lambda: raised(statecopy.ArgumentError, lambda: frozen.plan.gather(rows, few)))
frozen.hooks.kept.clear()
assert error.code == "FLAGS_MISMATCH", error
assert frozen.client.counters()["pool_bytes_in_use"] > held_before, "the graph writes what was copied for it"
graph.replay(stream)
stream.synchronise()
graph.end()
until(
    "what the graph had is given back",
    lambda: frozen.client.check() is None and frozen.client.counters()["pool_bytes_in_use"] == held_before,
)
frozen.client.close()
held("after a freeze what is new is copied in the stream's order")

sets = Bed()
stream = sets.hooks.use(Stream())
halves = {name: sets.memory.view((6, 2, 3, 8), offset=at * 6 * ROW_BYTES) for at, name in enumerate("ab")}
both = sets.client.register(halves, max_selected=4, sets={"both": ["a", "b"]}).sets["both"]
stream.hold()
packed = both.gather_all(sets.rows(2, 2))
both.scatter_all(packed, sets.rows(4, 2))
stream.go_on()
stream.synchronise()
assert packed.shape == (2, 2, 2, 3, 8) and holds(packed, 3, 4, 9, 10), packed.shape
assert [sets.row(row) for row in (4, 5, 10, 11)] == [{3}, {4}, {9}, {10}]
graph, _ = stream.capture(lambda: both.scatter_all(packed, sets.rows(0, 2)))
graph.replay(stream)
stream.synchronise()
assert [sets.row(row) for row in (0, 1, 6, 7)] == [{3}, {4}, {9}, {10}]
graph.end()
sets.client.close()
held("a set of layers is copied by one request, on a stream and in a graph")

bed.fill()
stream, replayed = hooks.use(Stream()), Stream()
said, floats = [], bed.packed(1)


def step():
    said.append(raised(statecopy.ArgumentError, lambda: plan.gather([1, 2])))
    said.append(raised(statecopy.Error, lambda: plan.submit_gather(vector)))
    said.append(raised(statecopy.ArgumentError, lambda: plan.gather(floats)))
    result = plan.gather(vector)
    plan.scatter(result, bed.rows(11))
    return result


vector = bed.hooks.memory.view((1,), offset=hooks.room(64), code=INT)
graph, result = stream.capture(step)
assert said[0].about == "indices" and "captured" in str(said[0]) and said[0].remedy, said[0]
assert "captured" in str(said[1]), said[1]
for turn in range(50):
    row = turn % 10
    replayed.write(hooks.memory, array.array("i", [row]), vector.address - hooks.memory.address)
    graph.replay(replayed)
    replayed.synchronise()
    replayed.used = 64
    assert holds(result, row + 1) and bed.row(11) == {row + 1}, turn
bed.client.check()
held("a captured copy is made at every replay, with the indices of then")

for _ in range(500):
    graph.end()
    graph, _ = stream.capture(lambda: plan.gather(vector))
graph.replay(stream)
stream.synchronise()
bed.client.check()
graph.end()
held("a graph that is gone gives back what it had")

stream = lost.hooks.use(Stream())
graph, captured = stream.capture(lambda: lost.plan.gather(lost.rows(3)))
address = captured.address
del captured
lost.hooks.kept.clear()
others = [lost.plan.gather(lost.rows(row)) for row in range(ROWS)]
stream.synchronise()
assert address not in {other.address for other in others}
lost.client.trim()
graph.replay(stream)
stream.synchronise()
lost.client.check()
assert holds(Wrapped(address), 4) and all(holds(other, row + 1) for row, other in enumerate(others))
graph.end()
lost.client.close()
held("a buffer of the pool that a graph writes is nobody else's")

behind = Bed(pooled=True)
stream = behind.hooks.use(Stream())
stream.hold()
result = behind.plan.gather(behind.rows(5))
address = result.address
del result
behind.hooks.kept.clear()
trimming = threading.Thread(target=behind.client.trim)
trimming.start()
until("trimming has begun", lambda: behind.client.counters()["pool_bytes"] == 0)
# So long it waits for the stream, if it does.
trimming.join(0.2)
assert trimming.is_alive(), "the copy's turn has not come"
stream.go_on()
trimming.join()
stream.synchronise()
behind.client.check()
behind.client.close()
held("what is trimmed is kept until the copies that name it are made")

small = Bed(pooled=True, pool_bytes_max=5 << 20)
first, other, third = Stream(), Stream(), Stream()
small.hooks.use(first)
kept = [small.plan.gather(small.rows(row)) for row in (3, 4)]
first.hold()
del kept
small.hooks.kept.clear()
misses = small.client.counters()["pool_misses"]


def take_over():
    small.hooks.use(other)
    return [small.plan.gather(small.rows(row)) for row in (5, 6)]


capture, taken = third.capture(take_over)
assert small.client.counters()["pool_misses"] == misses, "there is no room for another one"
assert not other.is_done_within(0.2), "the first stream may read it yet"
first.go_on()
other.synchronise()
assert all(holds(result, row) for result, row in zip(taken, (6, 7), strict=True))
capture.end()
held("a buffer of the pool changes streams in order, and neither the host waits nor a capture ends")

large = Memory(16 << 20)
large.write(b"\x05" * large.nbytes)
plan = small.client.register({"large": large.view((4, 1, 1024, 1024))}, max_selected=1)["large"]
other.hold()
small.hooks.use(other)
del taken
small.hooks.kept.clear()
small.hooks.use(third)
result = plan.gather(small.rows(2))
third.synchronise()
assert read(result.address, 4 << 20) == b"\x05" * (4 << 20), "nobody waited for the other stream"
other.go_on()
assert small.client.counters()["pool_bytes"] <= 5 << 20
small.client.close()
held("what is given up is freed once its stream is past it")

plan = bed.plan
plain = Bed(completion="host")
stream = plain.hooks.use(Stream())
result = plain.plan.gather(plain.rows(2))
assert holds(result, 3) and plain.client.info()["completion"] == "host"
plain.client.check()
plain.client.close()
held("a client that is host-completed returns when the bytes are there")

stream, resting = Stream(), Stream()
hooks.use(resting)
plan.gather(bed.rows(1))
resting.synchronise()
hooks.use(stream)
until("the copy is known to be over", lambda: bed.client.trim() is not None and bed.client.check() is None)
graph, _ = stream.capture(lambda: plan.gather(bed.rows(1)))
stream.hold()
plan.gather(bed.rows(1))
tell("kill")
stream.go_on()
stream.synchronise()
error = raised(statecopy.Error, bed.client.check)
assert error.about == "stream" and error.leaves == "unknown", (error, error.leaves)
for copy in (lambda: plan.gather(bed.rows(1)), lambda: plan.scatter(bed.packed(9), bed.rows(1))):
    error = raised(statecopy.Error, copy)
    assert error.about == "stream" and error.leaves == "unknown", (error, error.leaves)
assert raised(statecopy.Error, bed.client._core._check_stream).about == "stream"
hooks.use(resting)
bed.client._core._check_stream()
error = raised(statecopy.Unavailable, lambda: plan.gather(bed.rows(1)))
assert error.about != "stream" and error.leaves == "nothing_moved", (error, error.leaves)
tell("start")
result = plan.gather(bed.rows(1))
resting.synchronise()
assert holds(result, 2)
hooks.use(stream)
error = raised(statecopy.Error, lambda: plan.gather(bed.rows(1)))
assert error.about == "stream", error
raised(statecopy.Error, bed.client.check)
bed.client.reset_lanes()
error = raised(statecopy.Error, bed.client.check)
assert error.about == "graph" and "apture it again" in str(error), error
replay = Stream()
graph.replay(replay)
replay.synchronise()
graph.end()


def is_sound():
    try:
        return bed.client.check() is None
    except statecopy.Error as error:
        return error.about != "graph"


until("the driver has told of the graph's end", is_sound)
bed.client.check()
result = plan.gather(bed.rows(4))
stream.synchronise()
assert holds(result, 5)
held("a stream that lost a copy to the daemon's end raises until it is reset, and no other does")

bed.client.close()
os._exit(0)
