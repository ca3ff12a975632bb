#!/usr/bin/env python3
"""Measures variants of state_copy.cu beside a Triton kernel that does the same, on this machine's first GPU.

usage: python3 tests/device/kernel_probe.py

Needs nvcc, torch and triton; without triton only its rows are missing. Builds kernel_probe.cpp, has Triton compile its kernel
for several blocks and numbers of warps, and hands both to the program, which measures them in one process over the same rows.
Takes about a minute. The last line is 'all bytes were right'.
"""

import glob
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "kernels/src/cuda/state_copy.cu"
PAYLOAD = 196_608  # elements of FP32
PAGE_STRIDE = 27 * PAYLOAD
ROWS = 512

try:
    import torch
    import triton
    import triton.language as tl
except ImportError as missing:
    torch = None
    print(f"no rows for Triton: {missing}", file=sys.stderr)

if torch is not None:

    @triton.jit
    def gather(cache, packed, indices, rows, page_stride, PAYLOAD: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(1).to(tl.int64)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        index = tl.load(indices + row).to(tl.int64)
        valid = (index >= 0) & (index < rows)
        inside = at < PAYLOAD
        values = tl.load(cache + index * page_stride + at, mask=inside & valid, other=0.0)
        tl.store(packed + row * PAYLOAD + at, values, mask=inside)

    @triton.jit
    def scatter(cache, packed, indices, rows, page_stride, PAYLOAD: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(1).to(tl.int64)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        index = tl.load(indices + row).to(tl.int64)
        valid = (index >= 0) & (index < rows)
        inside = at < PAYLOAD
        values = tl.load(packed + row * PAYLOAD + at, mask=inside & valid, other=0.0)
        tl.store(cache + index * page_stride + at, values, mask=inside & valid)


def triton_kernels(work):
    """Compiles by a launch over one row, and lists what came out."""
    lines = []
    cache = torch.zeros(PAYLOAD, device="cuda")
    packed = torch.zeros(PAYLOAD, device="cuda")
    indices = torch.zeros(16, dtype=torch.int32, device="cuda")
    for direction, kernel in (("gather", gather), ("scatter", scatter)):
        for block in (1024, 2048, 4096, 8192):
            for warps in (4, 8):
                grid = (PAYLOAD // block, 1)
                compiled = kernel[grid](
                    cache, packed, indices, ROWS, PAGE_STRIDE, PAYLOAD=PAYLOAD, BLOCK=block, num_warps=warps
                )
                metadata = compiled.metadata
                name = f"triton_{block}_w{warps}"
                file = work / f"{name}_{direction}.cubin"
                file.write_bytes(compiled.asm["cubin"])
                lines.append(f"{name} {file} {metadata.name} {32 * warps} {metadata.shared} {block} {direction}")
    torch.cuda.synchronize()
    return "\n".join(lines) + "\n"


def first(patterns):
    for pattern in patterns:
        found = sorted(glob.glob(str(pattern)))
        if found:
            return found[0]
    sys.exit(f"none of these is there: {', '.join(map(str, patterns))}")


def build(work):
    nvcc = pathlib.Path(shutil.which("nvcc") or first(["/usr/local/cuda*/bin/nvcc"])).resolve()
    root = nvcc.parent.parent
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    nvrtc = first(
        [root / "lib64/libnvrtc.so.1[0-9]", root / "lib/libnvrtc.so.1[0-9]", root / "targets/*/lib/libnvrtc.so.1[0-9]",
         site / "nvidia/*/lib/libnvrtc.so.1[0-9]"]
    )
    driver = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    places = [line.split("=> ")[1] for line in driver.splitlines() if "libcuda.so.1 " in line and "=> " in line]
    driver = first([*places, "/usr/lib/*/libcuda.so.1", "/usr/lib64/libcuda.so.1", "/usr/local/nvidia/lib*/libcuda.so.1",
                    "/usr/lib/libcuda.so.1"])
    program = work / "kernel_probe"
    libraries = pathlib.Path(nvrtc).parent
    subprocess.run(
        [nvcc, "-O2", "-std=c++17", "-o", program, HERE / "kernel_probe.cpp", "-Xlinker", driver, "-Xlinker", nvrtc,
         "-Xlinker", "-rpath", "-Xlinker", libraries, "-Xlinker", "--allow-shlib-undefined"],
        check=True,
    )
    return program, libraries


def main():
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as directory:
        work = pathlib.Path(directory)
        program, libraries = build(work)
        arguments = [program, SOURCE, "sm_90"]
        if torch is not None:
            major, minor = torch.cuda.get_device_capability()
            arguments[2] = f"sm_{major}{minor}"
            (work / "triton.list").write_text(triton_kernels(work), encoding="utf-8")
            arguments.append(work / "triton.list")
        # NVRTC opens a second library by its name alone.
        paths = [str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)}
        sys.exit(subprocess.run(arguments, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
