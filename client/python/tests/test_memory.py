"""Tensors of shared memory: their layouts, who keeps them, and what a client knows of them."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import statecopy
from daemon_process import PATIENCE_S

if TYPE_CHECKING:
    from daemon_process import Daemon

torch = pytest.importorskip("torch")

DTYPES = [
    *("float32", "bfloat16", "float16", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool", "float8_e4m3fn", "float8_e5m2", "complex64"),
]
# NumPy knows no name for these, and DLPack as torch reads it no number for the last two.
NOT_OF_NUMPY = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
NOT_BY_DLPACK = {"float8_e4m3fn", "float8_e5m2"}


def mappings(name: str = "statecopy.empty") -> int:
    """How many memory files of that name this process has mapped."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{name} ")


@pytest.fixture(autouse=True)
def _nothing_is_left_mapped() -> Iterator[None]:
    # What a failed test left behind goes whenever it likes.
    gc.collect()
    before = mappings()
    yield
    gc.collect()
    assert mappings() <= before


class TestEmpty:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_data_type_reaches_numpy_and_torch_as_itself(self, dtype: str) -> None:
        tensor = statecopy.empty((3, 5), dtype)
        assert (tensor.dtype, tensor.shape, tensor.strides) == (dtype, (3, 5), (5, 1))
        if dtype not in NOT_BY_DLPACK:
            assert torch.from_dlpack(tensor).dtype == getattr(torch, dtype)
        if dtype not in NOT_OF_NUMPY:
            array = np.asarray(tensor)
            assert array.dtype == np.dtype(dtype)
            assert tensor.nbytes == array.nbytes
            assert not array.any()
        else:
            with pytest.raises(TypeError, match=f"{dtype}.*DLPack"):
                np.asarray(tensor)

    def test_strides_are_those_that_were_asked_for(self) -> None:
        tensor = statecopy.empty((4, 2, 3, 5), "float32", strides=(64, 15, 5, 1))
        array = np.asarray(tensor)
        assert array.strides == (256, 60, 20, 4)
        assert torch.from_dlpack(tensor).stride() == (64, 15, 5, 1)
        array[:] = np.arange(120).reshape(4, 2, 3, 5)
        assert torch.from_dlpack(tensor)[3, 1, 2, 4] == 119
        assert np.from_dlpack(tensor).base is not None
        assert array.ctypes.data % 4096 == 0
        assert tensor.nbytes == 480
        assert len(tensor) == 4
        assert repr(tensor) == "statecopy.Tensor((4, 2, 3, 5), float32, strides=(64, 15, 5, 1), device=cpu)"
        assert repr(statecopy.empty((7,), "bool")) == "statecopy.Tensor((7,), bool, device=cpu)"

    @pytest.mark.parametrize(
        "dtype", [np.float32, np.dtype("float32"), torch.float32, "float32"], ids=["type", "numpy", "torch", "name"]
    )
    def test_a_data_type_may_be_an_object_of_the_library(self, dtype: object) -> None:
        assert statecopy.empty((2,), dtype).dtype == "float32"

    def test_untouched_memory_costs_nothing(self) -> None:
        tensor = statecopy.empty((1 << 40,), "uint8")
        torch.from_dlpack(tensor)[1 << 39] = 7
        assert np.asarray(tensor)[1 << 39] == 7

    @pytest.mark.parametrize(
        ("arguments", "about", "part"),
        [
            (((), "float32"), "shape", "at least one axis"),
            (((2, 0), "float32"), "shape", "axis 1 has 0"),
            (((2, -3), "float32"), "shape", "axis 1 has -3"),
            (((2, 2), "float31"), "dtype", "float31 is none of float32"),
            (((2, 2), "float32", (1, 1)), "strides", r"overlap: stride\(\d\) is 1"),
            (((2, 2), "float32", (0, 1)), "strides", r"overlap: stride\(0\) is 0"),
            (((2, 2), "float32", (-2, 1)), "strides", "axis 0 has -2"),
            (((2, 2), "float32", (1,)), "strides", "1 strides for 2 axes"),
            (((1 << 62, 4), "int8"), "shape", "2\\^63 bytes"),
            (((2, 2), "float64", (1 << 62, 1)), "shape", "2\\^63 bytes"),
        ],
    )
    def test_what_is_no_tensor_is_an_argument_error(self, arguments: tuple[Any, ...], about: str, part: str) -> None:
        with pytest.raises(statecopy.ArgumentError, match=part) as raised:
            statecopy.empty(*arguments)
        assert raised.value.about == about

    def test_axes_may_lie_in_any_order_and_sizes_of_one_anywhere(self) -> None:
        statecopy.empty((2, 3), "float32", strides=(1, 2))
        statecopy.empty((2, 1, 3), "float32", strides=(3, 0, 1))
        with pytest.raises(statecopy.ArgumentError, match="overlap"):
            statecopy.empty((2, 3), "float32", strides=(2, 1))


class TestDlpack:
    def test_a_consumer_that_knows_version_1_gets_it(self) -> None:
        tensor = statecopy.empty((2,), "int8")
        assert '"dltensor"' in repr(tensor.__dlpack__())
        assert '"dltensor"' in repr(tensor.__dlpack__(max_version=(0, 8)))
        assert '"dltensor_versioned"' in repr(tensor.__dlpack__(max_version=(1, 0)))
        assert tensor.__dlpack_device__() == (1, 0)

    @pytest.mark.parametrize("asked", [{"stream": 1}, {"dl_device": (2, 0)}, {"copy": True}])
    def test_what_cannot_be_had_is_a_buffer_error(self, asked: dict[str, Any]) -> None:
        with pytest.raises(BufferError):
            statecopy.empty((2,), "int8").__dlpack__(**asked)

    @pytest.mark.parametrize("version", [None, (1, 0)])
    def test_a_capsule_that_nobody_consumed_gives_its_memory_back(self, version: tuple[int, int] | None) -> None:
        before = mappings()
        capsule = statecopy.empty((2,), "int8").__dlpack__(max_version=version)
        assert mappings() == before + 1
        del capsule
        assert mappings() == before

    @pytest.mark.parametrize("take", [torch.from_dlpack, np.from_dlpack, np.asarray], ids=["torch", "numpy", "array"])
    def test_whoever_took_it_keeps_the_memory_and_gives_it_back(self, take: Callable[[Any], Any]) -> None:
        before = mappings()
        tensor = statecopy.empty((4, 8), "float32")
        taken = take(tensor)
        del tensor
        taken[:] = 3
        view = taken[1:, 2:]
        del taken
        assert mappings() == before + 1
        assert view.sum() == 3 * 6 * 3
        del view
        assert mappings() == before

    def test_memory_may_be_given_back_by_another_thread(self) -> None:
        before = mappings()
        taken = [torch.from_dlpack(statecopy.empty((1024,), "float32")) for _ in range(64)]
        capsules = [statecopy.empty((2,), "int8").__dlpack__() for _ in range(64)]
        threads = [threading.Thread(target=held.clear) for held in (taken, capsules)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert mappings() == before

    def test_many_exports_leave_nothing(self) -> None:
        tensor = statecopy.empty((16, 4), "float32")
        status = Path("/proc/self/statm")

        def export(times: int) -> int:
            for _ in range(times):
                torch.from_dlpack(tensor)
                tensor.__dlpack__(max_version=(1, 0))
            return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        warm = export(20_000)
        assert export(100_000) - warm < 4 << 20


def gathering(client: statecopy.Client) -> tuple[np.ndarray, statecopy.Plan]:
    cache = statecopy.empty((8, 2, 16, 16), "float32", strides=(1024, 256, 16, 1))
    rows = np.asarray(cache)
    rows[:] = np.arange(8).reshape(8, 1, 1, 1)
    return rows, client.register({"layers.0": cache}, max_selected=8)["layers.0"]


class TestPool:
    def test_a_result_is_given_back_with_its_last_view(self, client: statecopy.Client) -> None:
        _rows, plan = gathering(client)
        packed = np.asarray(plan.gather([3, -1]))
        assert (packed[0] == 3).all()
        assert not packed[1].any()
        in_use = client.counters()["pool_bytes_in_use"]
        assert in_use > 0
        view = packed[0, 1:]
        del packed
        assert client.counters()["pool_bytes_in_use"] == in_use
        assert (view == 3).all()
        del view
        gc.collect()
        assert client.counters()["pool_bytes_in_use"] == 0

    def test_many_gathers_use_few_buffers(self, client: statecopy.Client) -> None:
        _rows, plan = gathering(client)
        for count in range(2000):
            packed = plan.gather([count % 8] * (1 + count % 8))
            assert np.asarray(packed)[0, 0, 0, 0] == count % 8
        counters = client.counters()
        assert counters["pool_hits"] + counters["pool_misses"] == 2000
        assert counters["pool_buffers"] <= 3, counters
        assert mappings("statecopy.pool") == counters["pool_buffers"]
        del packed
        assert client.trim() >= counters["pool_bytes"]
        assert mappings("statecopy.pool") == 0

    def test_a_result_lives_on_without_daemon_or_client(self, daemon: Daemon) -> None:
        with statecopy.connect(daemon.address) as client:
            _rows, plan = gathering(client)
            packed = np.asarray(plan.gather([5]))
            daemon.kill()
            assert (packed == 5).all()
        assert (packed == 5).all()
        assert mappings("statecopy.pool") == 1
        del packed
        assert mappings("statecopy.pool") == 0

    def test_a_full_pool_names_its_limit(self, daemon: Daemon) -> None:
        with statecopy.connect(daemon.address, pool_bytes_max=64 << 10) as client:
            _rows, plan = gathering(client)
            held = plan.gather([1])
            with pytest.raises(statecopy.CapacityError, match="65536 bytes, of which 65536 are in use"):
                plan.gather([2])
            del held
            assert np.asarray(plan.gather([2]))[0, 0, 0, 0] == 2


class TestRegions:
    def test_memory_of_empty_is_used_where_it_lies(self, client: statecopy.Client) -> None:
        rows, plan = gathering(client)
        own = np.asarray(statecopy.empty((4, 2, 16, 16), "float32"))
        assert plan.gather([6, 7], out=own[1:3]) is not None
        assert (own[1] == 6).all()
        assert (own[2] == 7).all()
        assert not own[0].any()
        own[1:3] = 9
        plan.scatter(torch.from_numpy(own)[1:3], [0, 5])
        assert (rows[0] == 9).all()
        assert (rows[5] == 9).all()
        assert (rows[1] == 1).all()
        counters = client.counters()
        assert counters["regions_registered"] == 2, "the cache and the operand, once each"
        assert counters["operands_copied"] == 0

    def test_operands_that_are_gone_are_let_go(self, client: statecopy.Client) -> None:
        _rows, plan = gathering(client)
        before = mappings()
        for count in range(50):
            plan.gather([count % 8], out=statecopy.empty((1, 2, 16, 16), "float32"))
            assert mappings() <= before + 2
        assert client.counters()["regions_registered"] == 51
        known = np.zeros((1, 2, 16, 16), np.float32)
        plan.scatter(known, [0])
        assert mappings() == before, "the next operand is time enough"
        assert client.counters()["regions_dropped"] == 50

    def test_once_frozen_a_new_operand_is_copied(self, client: statecopy.Client) -> None:
        rows, plan = gathering(client)
        known = statecopy.empty((1, 2, 16, 16), "float32")
        plan.gather([1], out=known)
        client.freeze()
        new = statecopy.empty((1, 2, 16, 16), "float32")
        np.asarray(new)[:] = 4
        plan.scatter(known, [2])
        assert client.counters()["operands_copied"] == 0
        plan.scatter(new, [3])
        assert (rows[2] == 1).all()
        assert (rows[3] == 4).all()
        assert client.counters()["operands_copied"] == 1
        assert client.counters()["regions_registered"] == 2

    def test_regions_outlive_the_daemon(self, daemon: Daemon, client: statecopy.Client) -> None:
        rows, plan = gathering(client)
        own = np.asarray(statecopy.empty((1, 2, 16, 16), "float32"))
        packed = plan.gather([3])
        plan.gather([1], out=own)
        daemon.restart()
        plan.gather([2], out=own)
        assert (own == 2).all()
        plan.scatter(packed, [4])
        assert (rows[4] == 3).all()
        assert client.counters()["regions_registered"] == 2


# Python 3.12 warns of a fork beside threads, which torch has: the child runs nothing of theirs.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
class TestFork:
    def test_a_child_gives_nothing_back_and_the_parent_goes_on(self, client: statecopy.Client) -> None:
        rows, plan = gathering(client)
        packed = plan.gather([3])
        held = [torch.from_dlpack(packed), packed.__dlpack__(), torch.from_dlpack(statecopy.empty((2,), "int8"))]
        before = mappings()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                held.clear()
                del packed
                gc.collect()
                own = np.asarray(statecopy.empty((4,), "float32"))
                own[:] = 1
                del own
                # Its own memory is gone, that of its parent is not touched.
                code = 0 if (mappings("statecopy.pool"), mappings()) == (1, before) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        plan.scatter(packed, [4])
        assert (rows[4] == 3).all()
        assert client.counters()["pool_bytes_in_use"] > 0
        held.clear()
        del packed
        gc.collect()
        assert client.counters()["pool_bytes_in_use"] == 0

    def test_a_child_that_lets_go_of_the_client_leaves_the_parent_its_session(self, daemon: Daemon) -> None:
        client = statecopy.connect(daemon.address, timeout_s=PATIENCE_S)
        _rows, plan = gathering(client)
        session = client.info()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(statecopy.ForkedError):
                    client.ping()
                del client, plan
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.ping()
        assert np.asarray(plan.gather([3]))[0, 0, 0, 0] == 3
        assert client.info() == session
        client.close()

    def test_a_child_that_connects_for_itself_shares_its_own_memory_and_its_parents(self, daemon: Daemon) -> None:
        inherited = statecopy.empty((1, 2, 16, 16), "float32")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with statecopy.connect(daemon.address) as client:
                    _rows, plan = gathering(client)
                    own = statecopy.empty((1, 2, 16, 16), "float32")
                    plan.gather([3], out=own)
                    plan.gather([5], out=inherited)
                    assert np.asarray(own).mean() == 3
                    assert client.counters()["regions_registered"] == 3
                    assert client.counters()["operands_copied"] == 0
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert np.asarray(inherited).mean() == 5, "both have it mapped"
