"""The wheel, as users install it: TEST_WHEEL names it. Without that these tests skip; tests/run sets it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_process import Daemon

HERE = Path(__file__).parent
# manylinux_2_28
GLIBC_NEWEST = (2, 28)
OLDEST_PYTHON = (3, 10)
# The buffer protocol. It joined the stable ABI with 3.11; CPython 3.10 has the same functions and promises nothing.
SINCE_3_11 = {"PyObject_GetBuffer", "PyBuffer_Release", "PyBuffer_IsContiguous", "PyObject_CheckBuffer"}
# What manylinux_2_28 lets an extension link to, as far as we do.
LIBRARIES = {
    *("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libgcc_s.so.1"),
    *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
}

WITHOUT_NUMPY = """
import array
import ctypes
import importlib.util

import statecopy

assert importlib.util.find_spec("numpy") is None and importlib.util.find_spec("torch") is None


def address(tensor):
    return tensor.__array_interface__["data"][0]


def read(tensor):
    return ctypes.string_at(address(tensor), tensor.nbytes)


cache = statecopy.empty((4, 2, 3, 5), "float32")
packed = statecopy.empty((2, 2, 3, 5), "float32")
assert (cache.nbytes, packed.nbytes) == (480, 240)
ctypes.memset(address(cache), 0, 480)
ctypes.memmove(address(packed), bytes(range(240)), 240)
with statecopy.connect() as client:
    plan = client.register({"layers.0": cache}, max_selected=2)["layers.0"]
    plan.scatter(packed, array.array("i", [3, 1]))
    assert read(cache) == bytes(120) + bytes(range(120, 240)) + bytes(120) + bytes(range(120))
    gathered = plan.gather(array.array("q", [1, -1]))
    assert read(gathered) == bytes(range(120, 240)) + bytes(120)
print("copied")
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    named = os.environ.get("TEST_WHEEL")
    if not named:
        pytest.skip("TEST_WHEEL names no wheel: tests/run builds one")
    return Path(named)


@pytest.fixture(scope="module")
def extension(wheel: Path) -> io.BytesIO:
    with zipfile.ZipFile(wheel) as archive:
        return io.BytesIO(archive.read("statecopy/_core.abi3.so"))


def test_the_wheel_is_one_typed_abi3_package_and_holds_nothing_else(wheel: Path) -> None:
    assert re.fullmatch(r"statecopy-[\d.]+-cp310-abi3-manylinux_2_28_(x86_64|aarch64)\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert [name for name in names if ".so" in name] == ["statecopy/_core.abi3.so"]
    assert {"statecopy/__init__.py", "statecopy/py.typed", "statecopy/_core.pyi"} <= set(names)
    others = [name for name in names if not re.match(r"statecopy(-[\d.]+\.dist-info)?/", name) or "tests" in name]
    assert not others
    assert "\nRequires-Python: >=3.10\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert all("extra ==" in line for line in required), "it needs nothing"


def test_the_extension_needs_no_newer_glibc_than_its_tag_says_and_no_libpython(extension: io.BytesIO) -> None:
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(extension)
    needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert needed <= LIBRARIES, needed - LIBRARIES
    versions = {
        version.name
        for _, versions in elf.get_section_by_name(".gnu.version_r").iter_versions()
        for version in versions
        if version.name.startswith("GLIBC_")
    }
    newest = max(tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in versions)
    assert newest <= GLIBC_NEWEST, sorted(versions)


def test_the_extension_calls_nothing_outside_of_the_stable_abi(extension: io.BytesIO) -> None:
    import abi3info
    from elftools.elf.elffile import ELFFile

    stable = {**abi3info.FUNCTIONS, **abi3info.DATAS}
    added = {symbol.name: (entry.added.major, entry.added.minor) for symbol, entry in stable.items()}
    symbols = ELFFile(extension).get_section_by_name(".dynsym").iter_symbols()
    undefined = {symbol.name for symbol in symbols if symbol.entry.st_shndx == "SHN_UNDEF"}
    called = {name for name in undefined if name.startswith(("Py", "_Py"))}
    assert called, "it calls Python"
    beyond = {name for name in called - SINCE_3_11 if added.get(name, (99, 0)) > OLDEST_PYTHON}
    assert not beyond


@pytest.fixture
def environment(tmp_path: Path, daemon: Daemon) -> Iterator[dict[str, str]]:
    """Variables for a program in an environment of its own: nothing of this one's shows through."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "STATECOPY_"))}
    return {**kept, "STATECOPY_ADDR": daemon.address}


def installed(folder: Path, *packages: str | Path) -> Path:
    """The Python of a new virtual environment with these packages and nothing else."""
    # With PYTHONPATH, pip would find what is installed here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, env=environment)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    subprocess.run([*pip, *packages], check=True, env=environment)
    return python


def pinned(name: str) -> list[str]:
    """The lines of the requirements for one package."""
    lines = (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith(f"{name}==")]


def examples(readme: Path) -> list[str]:
    """The Python blocks of a README."""
    return re.findall(r"^```python\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_a_clean_environment_with_numpy_the_examples_of_the_readme_run(
    wheel: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("\n".join(pinned("numpy")), encoding="utf-8")
    python = installed(tmp_path / "venv", wheel, "-r", requirements)
    blocks = examples(HERE.parent / "README.md")
    assert blocks
    for block in blocks:
        subprocess.run([python, "-W", "error", "-c", block], check=True, cwd=tmp_path, env=environment, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_a_clean_environment_without_numpy_and_torch_it_copies(
    wheel: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    python = installed(tmp_path / "venv", wheel)
    ran = subprocess.run(
        [python, "-W", "error", "-c", WITHOUT_NUMPY],
        check=True, cwd=tmp_path, env=environment, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.stdout == "copied\n"
