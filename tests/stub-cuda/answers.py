#!/usr/bin/env python3
"""Asks a CUDA driver what the header leaves open, one line an answer.

usage: answers.py [LIBRARY]    (default libcuda.so.1)

Run it with the stub driver (STATECOPY_STUB_CUDA_DIR names an empty folder) and on a machine with a GPU: where the lines
differ, the stub is wrong, or says no more than it must. Needs Python 3 and nothing else.
"""
import ctypes
import subprocess
import sys

LIBRARY = sys.argv[1] if len(sys.argv) > 1 else "libcuda.so.1"
PIECE = 2 << 20
cuda = ctypes.CDLL(LIBRARY)
u64 = ctypes.c_uint64


class Location(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("types", ctypes.c_int), ("location", Location), ("rest", u64 * 2)]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def call(name, *arguments):
    """Calls; integers are 64 bits wide unless they come as a ctypes value."""
    wide = [u64(each) if isinstance(each, int) else each for each in arguments]
    return getattr(cuda, name)(*wide)


def must(name, *arguments):
    code = call(name, *arguments)
    assert code == 0, f"{name}: {code}"


def out(name, *arguments):
    """The code, and what was written through the pointer that comes first."""
    value = u64(0)
    code = call(name, ctypes.byref(value), *arguments)
    return code, value.value


def made(name, *arguments):
    code, value = out(name, *arguments)
    assert code == 0, f"{name}: {code}"
    return value


def say(question, answer):
    print(f"{question}: {answer}", flush=True)


def start():
    must("cuInit", ctypes.c_uint(0))
    context = made("cuDevicePrimaryCtxRetain", ctypes.c_int(0))
    must("cuCtxSetCurrent", context)


def attribute(number, address):
    value = u64(0)
    code = call("cuPointerGetAttribute", ctypes.byref(value), ctypes.c_int(number), address)
    return value.value if code == 0 else f"error {code}"


def create(types, size=PIECE):
    properties = Properties(1, types, Location(1, 0))
    return out("cuMemCreate", size, ctypes.byref(properties), 0)


def allow(address, size, flags=3):
    access = Access(Location(1, 0), flags)
    return call("cuMemSetAccess", address, size, ctypes.byref(access), 1)


def virtual_memory():
    at = made("cuMemAddressReserve", 4 * PIECE, 0, 0, 0)
    code, first = create(1)
    _, second = create(1)
    say("create for a descriptor", code)
    say("create of an odd size", create(1, PIECE + 4096)[0])
    say("create for fabric", create(8)[0])
    say("reserve an odd size", out("cuMemAddressReserve", PIECE - 4096, 0, 0, 0)[0])
    say("map twice the memory", call("cuMemMap", at, 2 * PIECE, 0, first, 0))
    _, large = create(1, 2 * PIECE)
    code = call("cuMemMap", at, PIECE, 0, large, 0)
    say("map half of the memory", code)
    if code == 0:
        must("cuMemUnmap", at, PIECE)
    say("map at an offset", call("cuMemMap", at, PIECE, PIECE, large, 0))
    must("cuMemMap", at, PIECE, 0, first, 0)
    say("map where something is mapped", call("cuMemMap", at, PIECE, 0, second, 0))
    say("access to a range with a gap", allow(at, 2 * PIECE))
    must("cuMemMap", at + PIECE, PIECE, 0, second, 0)
    say("access to half of a piece", allow(at, PIECE // 2))
    say("access to two pieces", allow(at, 2 * PIECE))
    base, size = u64(0), u64(0)
    must("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), at + PIECE + 5)
    say("address range of the second piece", (base.value - at, size.value))
    for name, number in [("range start", 11), ("mapping base", 19)]:
        say(f"{name} of the second piece", attribute(number, at + PIECE + 5) - at)
    for name, number in [("range size", 12), ("mapping size", 18), ("handle types", 14), ("legacy capable", 10)]:
        say(f"{name} of the second piece", attribute(number, at + PIECE + 5))
    say("two pieces have one buffer id", attribute(7, at) == attribute(7, at + PIECE))
    say("legacy handle of a piece", call("cuIpcGetMemHandle", ctypes.byref(Handle()), at))
    code, again = out("cuMemRetainAllocationHandle", at + 7)
    say("retain inside a piece", (code, again == first))
    must("cuMemRelease", again)
    descriptor = ctypes.c_int(-1)
    must("cuMemExportToShareableHandle", ctypes.byref(descriptor), first, ctypes.c_int(1), 0)
    code, imported = out("cuMemImportFromShareableHandle", descriptor.value, ctypes.c_int(1))
    say("import of an own descriptor", (code, imported == first))
    with open("/dev/null", "rb") as other:
        say("import of another file", out("cuMemImportFromShareableHandle", other.fileno(), ctypes.c_int(1))[0])
    say("import of no descriptor", out("cuMemImportFromShareableHandle", 2**64 - 1, ctypes.c_int(1))[0])
    say("unmap a range with a gap", call("cuMemUnmap", at, 3 * PIECE))
    say("free addresses in use", call("cuMemAddressFree", at, 4 * PIECE))
    say("unmap two pieces at once", call("cuMemUnmap", at, 2 * PIECE))
    say("free half of the addresses", call("cuMemAddressFree", at, 2 * PIECE))
    say("free the addresses", call("cuMemAddressFree", at, 4 * PIECE))
    say("release, and once more", (call("cuMemRelease", large), call("cuMemRelease", large)))


def other_memory():
    memory = made("cuMemAlloc_v2", 5 * PIECE)
    say("attributes of the default allocator", [attribute(number, memory + 5) for number in (2, 8, 10, 14, 17)])
    base, size = u64(0), u64(0)
    must("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), memory + 5)
    say("its range", (base.value - memory, size.value))
    handle = Handle()
    must("cuIpcGetMemHandle", ctypes.byref(handle), memory)
    say("open a legacy handle of the own process", out("cuIpcOpenMemHandle_v2", handle, ctypes.c_uint(1))[0])
    say("address range of nothing", call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), 4096))
    say("attribute of nothing", attribute(7, 4096))
    code, pool = out("cuMemAllocAsync", PIECE, 0)
    say("pool memory", code)
    if code == 0:
        say("its attributes", [attribute(number, pool) for number in (2, 8, 10, 14)] + [attribute(17, pool) != 0])
        say("its legacy handle", call("cuIpcGetMemHandle", ctypes.byref(Handle()), pool))
    host = made("cuMemHostAlloc", PIECE, ctypes.c_uint(3))
    say("attributes of host memory", [attribute(number, host) for number in (2, 8, 10, 14, 17)])
    say("allocate nothing", out("cuMemAlloc_v2", 0)[0])
    say("free what was not allocated", call("cuMemFree_v2", memory + 512))
    say("load zeros", out("cuModuleLoadData", ctypes.c_char_p(bytes(64)))[0])


def processes():
    command = [sys.executable, __file__, LIBRARY, "exporter"]
    exporter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    handle = Handle()
    handle.bytes[:] = bytes.fromhex(exporter.stdout.readline())
    code, memory = out("cuIpcOpenMemHandle_v2", handle, ctypes.c_uint(1))
    say("open a legacy handle", code)
    again = out("cuIpcOpenMemHandle_v2", handle, ctypes.c_uint(1))
    say("open it again", (again[0], again[1] == memory))
    base, size = u64(0), u64(0)
    must("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), memory)
    say("its range", (base.value - memory, size.value))
    say("attributes of opened memory", [attribute(number, memory) for number in (2, 8, 10, 14, 17)])
    say("a legacy handle of opened memory", call("cuIpcGetMemHandle", ctypes.byref(Handle()), memory))
    say("close twice, then once more", [call("cuIpcCloseMemHandle", memory) for _ in range(3)])
    exporter.stdin.write("free\n")
    exporter.stdin.flush()
    exporter.stdout.readline()
    say("open a handle of freed memory", out("cuIpcOpenMemHandle_v2", handle, ctypes.c_uint(1))[0])
    handle.bytes[:] = bytes(64)
    say("open zeros", out("cuIpcOpenMemHandle_v2", handle, ctypes.c_uint(1))[0])
    exporter.stdin.close()
    exporter.wait()


def exporter():
    start()
    memory = made("cuMemAlloc_v2", 5 * PIECE)
    handle = Handle()
    must("cuIpcGetMemHandle", ctypes.byref(handle), memory)
    print(bytes(handle.bytes).hex(), flush=True)
    sys.stdin.readline()
    must("cuMemFree_v2", memory)
    print("freed", flush=True)
    sys.stdin.read()


if len(sys.argv) > 2:
    exporter()
else:
    start()
    virtual_memory()
    other_memory()
    processes()
