"""A worker in Python on a CUDA device, without torch: device memory by the driver's own calls, tensors by DLPack alone.

Run by tests/tests/python_cuda.rs over the stub driver, with STATECOPY_ADDR and the package in its path. Prints the name of each
case that holds, and ends with 1 at the first that does not.
"""

import array
import ctypes
import gc
import os
import random

import statecopy
from cuda_tensors import INT, UINT, Managed, Memory, enter, lent, pythonapi, read

ROWS, PAYLOAD, PAGE, OFFSET = 12, 2 * 3 * 8, 2 * 3 * 8 + 20, 24
rng = random.Random(7)


def address_of(result):
    capsule = result.__dlpack__()
    managed = ctypes.cast(pythonapi.PyCapsule_GetPointer(capsule, b"dltensor"), ctypes.POINTER(Managed))
    return managed.contents.tensor.data


def rows_of(result):
    nbytes = PAYLOAD * 4
    data = read(address_of(result), result.nbytes)
    return [data[at : at + nbytes] for at in range(0, len(data), nbytes)]


def random_bytes(count):
    return rng.randbytes(count)


enter()

memory = Memory(OFFSET * 4 + ROWS * PAGE * 4)
whole = bytearray(random_bytes(memory.nbytes))
memory.write(whole)
cache = memory.view((ROWS, 2, 3, 8), (PAGE, 24, 8, 1), OFFSET * 4)


def row(at):
    start = (OFFSET + at * PAGE) * 4
    return bytes(whole[start : start + PAYLOAD * 4])


def refused(family, code, copy):
    try:
        copy()
    except family as error:
        assert error.code == code, error
        return error
    raise AssertionError(f"{code} was not raised")


ZERO = bytes(PAYLOAD * 4)
client = statecopy.connect()
assert client.info()["device"] == "cuda", client.info()
plan = client.register({"layer": cache}, max_selected=8)["layer"]

assert rows_of(plan.gather([3, -1, 0, ROWS, 3])) == [row(3), ZERO, row(0), ZERO, row(3)]
assert rows_of(plan.gather(array.array("i", [5, 6]), array.array("b", [0, 2]))) == [ZERO, row(6)]
print("indices and flags of the host go with the request")

indices = Memory(64)
indices.write(array.array("i", [7, 2, -5, 9]))
vector = indices.view((4,), code=INT)
route = plan.route(vector)
assert (route.how, route.address) == ("in_place", indices.address), route
flags = Memory(64)
flags.write(bytes([1, 0, 1, 255]))
assert rows_of(plan.gather(vector, flags.view((2, 2), code=UINT, bits=8))) == [row(7), ZERO, ZERO, row(9)]
indices.write(array.array("q", [1, 4]))
assert rows_of(plan.gather(indices.view((2,), code=INT, bits=64))) == [row(1), row(4)]
print("indices and flags of the device are read where they lie")

packed = Memory(3 * PAYLOAD * 4)
packed.write(random_bytes(packed.nbytes))
plan.scatter(packed.view((3, 2, 3, 8)), [8, -1, 2])
for at, which in ((8, 0), (2, 2)):
    start = (OFFSET + at * PAGE) * 4
    whole[start : start + PAYLOAD * 4] = packed.read()[which * PAYLOAD * 4 : (which + 1) * PAYLOAD * 4]
assert memory.read() == bytes(whole)
result = plan.gather([10, 11])
plan.scatter(result, [0, 1])
for at in (0, 1):
    start = (OFFSET + at * PAGE) * 4
    whole[start : start + PAYLOAD * 4] = row(10 + at)
assert memory.read() == bytes(whole)
print("packed is read where it lies, and no byte beside the rows is written")

out = Memory(2 * PAYLOAD * 4)
given = out.view((2, 2, 3, 8))
assert plan.gather([4, 5], out=given) is given
assert out.read() == row(4) + row(5)
pending = plan.submit_gather([6])
assert rows_of(pending.wait()) == [row(6)]
print("results go where they are wanted, and may be waited for later")

unaligned = indices.view((2,), offset=4, code=INT)
refused(statecopy.ArgumentError, "INDEX_TYPE", lambda: plan.gather(unaligned))
lost = Memory(2 * PAYLOAD * 4, pooled=True)
refused(statecopy.HandleError, "HANDLE_UNSUPPORTED", lambda: plan.scatter(lost.view((2, 2, 3, 8)), [0, 1]))
refused(statecopy.HandleError, "HANDLE_UNSUPPORTED", lambda: client.register({"x": lost.view((2, 2, 3, 8))}, max_selected=1))
assert memory.read() == bytes(whole)
print("memory that cannot be shared is refused")

elsewhere = {
    "indices": lambda: plan.gather(indices.view((4,), code=INT, ordinal=1)),
    "flags": lambda: plan.gather(vector, flags.view((4,), code=UINT, bits=8, ordinal=1)),
    "packed": lambda: plan.scatter(out.view((2, 2, 3, 8), ordinal=1), [0, 1]),
    "out": lambda: plan.gather([4, 5], out=out.view((2, 2, 3, 8), ordinal=1)),
    "other": lambda: client.register({"other": memory.view((2, 2, 3, 8), ordinal=1)}, max_selected=1),
}
for about, copy in elsewhere.items():
    error = refused(statecopy.ArgumentError, "DEVICE_NOT_VISIBLE", copy)
    assert error.about == about and "cuda:1" in str(error), error
assert memory.read() == bytes(whole)
print("a tensor of another device is refused")

plan = client.register({"layer": cache}, max_selected=8)["layer"]
held = client.counters()["pool_bytes_in_use"]
results = [plan.gather([1]) for _ in range(3)]
assert client.counters()["pool_bytes_in_use"] > held
del results
gc.collect()
before = client.counters()
for _ in range(200):
    plan.gather([1])
after = client.counters()
assert (after["pool_bytes"], after["pool_misses"]) == (before["pool_bytes"], before["pool_misses"]), (before, after)
print("buffers go back to the pool")

other = Memory(memory.nbytes)
whole = bytearray(random_bytes(other.nbytes))
other.write(whole)
client.release()
refused(statecopy.HandleError, "REGION_UNKNOWN", lambda: plan.gather([0]))
client.rebind({"layer": other.view((ROWS, 2, 3, 8), (PAGE, 24, 8, 1), OFFSET * 4)})
assert rows_of(plan.gather([0])) == [row(0)]
print("a layer sleeps, and wakes in other memory")

client.close()
del result, pending, given
gc.collect()
assert not lent, f"{len(lent)} tensors were not given back"
print("every tensor that was lent was given back")
os._exit(0)
