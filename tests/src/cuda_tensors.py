"""Device memory by the driver's own calls, and tensors over it that speak DLPack and nothing else."""

import ctypes

driver = ctypes.CDLL("libcuda.so.1")
pythonapi = ctypes.pythonapi
pythonapi.PyCapsule_New.restype = ctypes.py_object
pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

CUDA, FLOAT, INT, UINT = 2, 2, 0, 1


def call(name, *arguments):
    status = getattr(driver, name)(*arguments)
    assert status == 0, f"{name} says {status}"


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("ordinal", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    pass


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = [("tensor", Tensor), ("manager", ctypes.c_void_p), ("deleter", Deleter)]
lent = {}


@Deleter
def give_back(managed):
    del lent[ctypes.addressof(managed.contents)]


class Memory:
    """Device memory, as an allocator of somebody else gives it."""

    def __init__(self, nbytes, pooled=False):
        address = ctypes.c_uint64()
        if pooled:
            call("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(nbytes), None)
        else:
            call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.address, self.nbytes = address.value, nbytes

    def write(self, data, at=0):
        data = bytes(data)
        call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address + at), data, ctypes.c_size_t(len(data)))

    def read(self):
        return read(self.address, self.nbytes)

    def view(self, shape, strides=None, offset=0, code=FLOAT, bits=32, ordinal=0):
        return View(self, shape, strides, offset, code, bits, ordinal)


class View:
    """A tensor over it, for whoever speaks DLPack."""

    def __init__(self, memory, shape, strides, offset, code, bits, ordinal):
        self.memory, self.shape, self.strides, self.ordinal = memory, shape, strides, ordinal
        self.address, self.code, self.bits = memory.address + offset, code, bits

    def __dlpack_device__(self):
        return (CUDA, self.ordinal)

    def __dlpack__(self, stream=None):
        axes = ctypes.c_int64 * len(self.shape)
        shape, strides = axes(*self.shape), axes(*self.strides) if self.strides else None
        tensor = Tensor(self.address, CUDA, self.ordinal, len(self.shape), self.code, self.bits, 1, shape, strides, 0)
        managed = Managed(tensor, None, give_back)
        place = ctypes.addressof(managed)
        lent[place] = (managed, shape, strides, self)
        return pythonapi.PyCapsule_New(place, b"dltensor", None)


def read(address, nbytes):
    data = ctypes.create_string_buffer(nbytes)
    call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
    return data.raw


def enter():
    """Makes the first device's context current in this thread."""
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
