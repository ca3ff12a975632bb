"""Bad input: an exception before anything moves, that names argument, value and limit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import statecopy
from oracle import Cache, Layout, bytes_of, int32, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon_process import Daemon

FINAL = np.zeros((2, 2, 3, 5), dtype="float32")

# What is asked for; the code, the argument, and what the message must name.
GATHERS: dict[str, tuple[Callable[[statecopy.Plan], object], str | None, tuple[str, ...]]] = {
    "float indices": (
        lambda plan: plan.gather(np.array([1.0, 2.0], dtype=np.float32)),
        "INDEX_TYPE",
        ("indices", "float32", "int32", "int64"),
    ),
    "unsigned indices": (lambda plan: plan.gather(np.array([1], dtype=np.uint32)), "INDEX_TYPE", ("indices", "uint32")),
    "narrow indices": (lambda plan: plan.gather(np.array([1], dtype=np.int16)), "INDEX_TYPE", ("indices", "int16")),
    "truth values as indices": (lambda plan: plan.gather(np.array([True])), "INDEX_TYPE", ("indices", "bool")),
    "indices of another byte order": (lambda plan: plan.gather(np.array([1], dtype=">i4")), "INDEX_TYPE", ("indices",)),
    "indices of two axes": (lambda plan: plan.gather(np.zeros((2, 2), dtype=np.int32)), "INDEX_TYPE", ("indices", "2")),
    "a scalar index": (lambda plan: plan.gather(np.array(1, dtype=np.int32)), "INDEX_TYPE", ("indices",)),
    "objects as indices": (lambda plan: plan.gather(np.array(["a"], dtype=object)), "INDEX_TYPE", ("indices",)),
    "a list of words": (lambda plan: plan.gather(["a"]), "INDEX_TYPE", ("indices",)),
    "a list of fractions": (lambda plan: plan.gather([1.5]), "INDEX_TYPE", ("indices",)),
    "no indices": (lambda plan: plan.gather(None), None, ("indices", "None")),
    "flags of another length": (
        lambda plan: plan.gather(int32(1, 2, 3), np.array([True, False])),
        "FLAGS_MISMATCH",
        ("flags", "2", "3"),
    ),
    "float flags": (lambda plan: plan.gather(int32(1), np.array([1.0])), "FLAGS_MISMATCH", ("flags", "float64")),
    "more rows than registered": (
        lambda plan: plan.gather(int32(*[0] * 17)),
        "SELECTED_TOO_LARGE",
        ("17", "16", "max_selected"),
    ),
    "out of another count": (
        lambda plan: plan.gather(int32(1, 2, 3), out=np.asarray(statecopy.empty((2, 2, 3, 5), "float32"))),
        "PACKED_MISMATCH",
        ("out", "2", "3"),
    ),
    "out of another dtype": (
        lambda plan: plan.gather(int32(1, 2), out=np.asarray(statecopy.empty((2, 2, 3, 5), "int32"))),
        "PACKED_MISMATCH",
        ("out", "int32", "float32"),
    ),
    "out that is read-only": (
        lambda plan: plan.gather(int32(1, 2), out=_read_only(FINAL)),
        "PACKED_MISMATCH",
        ("out", "read-only"),
    ),
    "out that is strided": (
        lambda plan: plan.gather(int32(1, 2), out=np.zeros((2, 2, 3, 10), dtype="float32")[..., ::2]),
        "PACKED_MISMATCH",
        ("out", "[60, 30, 10, 2]"),
    ),
    "a timeout in the past": (lambda plan: plan.gather(int32(1), timeout_s=-1.0), None, ("timeout_s", "-1")),
    "a timeout that is no number": (lambda plan: plan.gather(int32(1), timeout_s=float("nan")), None, ("timeout_s",)),
}
SCATTERS: dict[str, tuple[Callable[[statecopy.Plan], object], str | None, tuple[str, ...]]] = {
    "float indices": (
        lambda plan: plan.scatter(FINAL, np.array([1.0, 2.0])),
        "INDEX_TYPE",
        ("indices", "float64", "int32", "int64"),
    ),
    "fewer states than indices": (
        lambda plan: plan.scatter(FINAL, int32(1, 2, 3)),
        "PACKED_MISMATCH",
        ("packed", "2", "3"),
    ),
    "states of another shape": (
        lambda plan: plan.scatter(np.zeros((2, 2, 5, 3), dtype="float32"), int32(1, 2)),
        "PACKED_MISMATCH",
        ("packed", "[2, 2, 5, 3]", "[2, 2, 3, 5]"),
    ),
    "states of another dtype": (
        lambda plan: plan.scatter(np.zeros((2, 2, 3, 5), dtype="float64"), int32(1, 2)),
        "PACKED_MISMATCH",
        ("packed", "float64", "float32"),
    ),
    "strided states": (
        lambda plan: plan.scatter(np.zeros((2, 2, 3, 10), dtype="float32")[..., ::2], int32(1, 2)),
        "PACKED_MISMATCH",
        ("packed", "[60, 30, 10, 2]", "contiguous"),
    ),
    "more rows than registered": (
        lambda plan: plan.scatter(np.zeros((17, 2, 3, 5), dtype="float32"), int32(*range(17))),
        "SELECTED_TOO_LARGE",
        ("17", "16"),
    ),
    "no states": (lambda plan: plan.scatter(None, int32(1)), None, ("packed", "None")),
}


def _read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.fixture
def cache_and_plan(client: statecopy.Client) -> Iterator[tuple[Cache, statecopy.Plan]]:
    """After the refusal nothing has moved, and the plan serves on."""
    cache = Cache()
    plan = plan_of(client, cache)
    before = client.counters()["bytes_moved"]
    yield cache, plan
    cache.check()
    assert client.counters()["bytes_moved"] == before
    assert bytes_of(plan.gather(int32(3))) == cache.gathered([3])


def check_refusal(error: statecopy.Error, code: str | None, named: tuple[str, ...]) -> None:
    assert error.code == code, error
    assert error.leaves == "nothing_moved"
    assert error.remedy
    assert str(error).endswith(error.remedy)
    words = re.sub(r"\((\d+(, \d+)*)\)", r"[\1]", str(error))
    missing = [name for name in named if name not in words]
    assert not missing, f"{missing} not in {words!r}"


@pytest.mark.parametrize("case", GATHERS)
def test_a_gather_refuses(cache_and_plan: tuple[Cache, statecopy.Plan], case: str) -> None:
    call, code, named = GATHERS[case]
    with pytest.raises(statecopy.ArgumentError) as caught:
        call(cache_and_plan[1])
    check_refusal(caught.value, code, named)


@pytest.mark.parametrize("case", SCATTERS)
def test_a_scatter_refuses(cache_and_plan: tuple[Cache, statecopy.Plan], case: str) -> None:
    call, code, named = SCATTERS[case]
    with pytest.raises(statecopy.ArgumentError) as caught:
        call(cache_and_plan[1])
    check_refusal(caught.value, code, named)


@pytest.mark.parametrize("case", GATHERS)
def test_a_submitted_gather_refuses_alike(cache_and_plan: tuple[Cache, statecopy.Plan], case: str) -> None:
    class Submitting:
        def gather(self, *arguments: Any, **named: Any) -> object:
            return cache_and_plan[1].submit_gather(*arguments, **named).wait()

    call, code, named = GATHERS[case]
    with pytest.raises(statecopy.ArgumentError) as caught:
        call(Submitting())  # type: ignore[arg-type]
    check_refusal(caught.value, code, named)


@pytest.mark.parametrize("gap", [8, 7], ids=["aligned", "unaligned"])
def test_packed_that_overlaps_the_cache_is_refused(client: statecopy.Client, gap: int) -> None:
    cache = Cache(Layout(shape=(6, 2, 3, 4), gap=gap, offset=4))
    plan = plan_of(client, cache)
    inside = cache.states[1:2]
    assert inside.flags.c_contiguous
    for call in (lambda: plan.gather(int32(3), out=inside), lambda: plan.submit_gather(int32(3), out=inside).wait()):
        with pytest.raises(statecopy.ArgumentError) as caught:
            call()
        assert caught.value.code == ("OVERLAP" if gap == 8 else "PACKED_MISMATCH")
        cache.check()


def test_repeated_destinations_are_refused_where_that_is_asked_for(client: statecopy.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache, check_unique=True)
    with pytest.raises(statecopy.ArgumentError) as caught:
        plan.scatter(cache.packed(3), int32(1, 4, 1))
    assert caught.value.code == "ROW_INVALID"
    assert "1" in str(caught.value)
    cache.check()
    # What is out of range is skipped, however often.
    final = cache.packed(3)
    plan.scatter(final, int32(-1, 4, -1))
    cache.scatter(final, int32(-1, 4, -1))
    cache.check()


def _padded(*strides: int) -> Any:
    memory = np.asarray(statecopy.empty((4096,), "float32"))
    return np.lib.stride_tricks.as_strided(memory, (4, 2, 3, 5), [stride * 4 for stride in strides])


STATES: dict[str, tuple[Callable[[], Any], str | None, tuple[str, ...]]] = {
    "payload that is not dense": (lambda: _padded(64, 30, 10, 2), "LAYOUT_INVALID", ("layers.1",)),
    "pages that overlap": (lambda: _padded(29, 15, 5, 1), "LAYOUT_INVALID", ("layers.1", "29", "30")),
    "pages at one place": (lambda: _padded(0, 15, 5, 1), "LAYOUT_INVALID", ("layers.1",)),
    "three axes": (lambda: np.asarray(statecopy.empty((4, 2, 3), "float32")), "LAYOUT_INVALID", ("layers.1", "4")),
    "no rows": (lambda: _padded(64, 15, 5, 1)[:0], "LAYOUT_INVALID", ("layers.1",)),
    "an empty axis": (lambda: _padded(64, 15, 5, 1)[:, :0], "LAYOUT_INVALID", ("layers.1",)),
    "16-byte elements": (
        lambda: np.asarray(statecopy.empty((64,), "float64")).view("complex128")[:30].reshape(1, 2, 3, 5),
        "LAYOUT_INVALID",
        ("layers.1", "128 bits"),
    ),
    "memory that nobody can share": (
        lambda: np.zeros((4, 2, 3, 5), dtype="float32"),
        "HANDLE_UNSUPPORTED",
        ("layers.1", "statecopy.empty"),
    ),
    "no tensor": (lambda: "cache", None, ("layers.1", "str")),
}


@pytest.mark.parametrize("case", STATES)
def test_one_bad_layer_of_two_publishes_none_and_is_named(client: statecopy.Client, daemon: Daemon, case: str) -> None:
    make, code, named = STATES[case]
    good = Cache()
    with pytest.raises(statecopy.Error) as caught:
        client.register({"layers.0": good.states, "layers.1": make()}, max_selected=4)
    check_refusal(caught.value, code, named)
    assert isinstance(caught.value, statecopy.ArgumentError) == (code != "HANDLE_UNSUPPORTED")
    assert daemon.metric("statecopy_layers") == 0
    plan = plan_of(client, good)
    assert bytes_of(plan.gather(int32(1))) == good.gathered([1])


@pytest.mark.parametrize("max_selected", [0, -1, 2**64, 1.5, "four", None])
def test_max_selected_is_a_positive_number_of_rows(client: statecopy.Client, max_selected: Any) -> None:
    cache = Cache()
    with pytest.raises(statecopy.ArgumentError) as caught:
        client.register({"layers.0": cache.states}, max_selected=max_selected)
    assert "max_selected" in str(caught.value)
    assert str(max_selected) in str(caught.value)


def test_a_registration_of_no_layer_is_refused(client: statecopy.Client) -> None:
    with pytest.raises(statecopy.ArgumentError) as caught:
        client.register({}, max_selected=4)
    check_refusal(caught.value, "LAYOUT_INVALID", ("layer", "release"))


@pytest.mark.parametrize(
    ("shape", "dtype", "strides", "named"),
    [
        ((4, 2), "float31", None, "float31"),
        ((4, 2), "complex128", None, "complex128"),
        ((4, 0), "float32", None, "0"),
        ((-1,), "float32", None, "-1"),
        ((), "float32", None, "axis"),
        ((4, 2), "float32", (1, 1), "overlap"),
        ((4, 2), "float32", (2,), "strides"),
        ((2**62, 4), "float32", None, "shape"),
    ],
)
def test_empty_refuses_what_is_no_tensor(shape: Any, dtype: str, strides: Any, named: str) -> None:
    with pytest.raises(statecopy.ArgumentError, match=named):
        statecopy.empty(shape, dtype, strides=strides)


@pytest.mark.parametrize("shape", ["8", 2.5, None, (4, "2"), 2**64, {"a": 1}])
def test_a_shape_of_another_type_is_named_in_words_of_python(shape: Any) -> None:
    with pytest.raises(TypeError) as caught:
        statecopy.empty(shape, "float32")
    assert str(caught.value) == f"shape: {shape!r} was given; integers of 64 bits are needed"


@pytest.mark.parametrize("sets", [5, ["all"], {"all": 5}, {"all": "layers.0"}, {"all": [0]}, {"all": b"0"}])
def test_sets_map_names_to_lists_of_layers(client: statecopy.Client, sets: Any) -> None:
    with pytest.raises(TypeError, match=r"^sets: "):
        client.register({"layers.0": Cache().states}, max_selected=4, sets=sets)


def test_every_exception_is_a_runtime_error_and_argument_errors_are_value_errors_too() -> None:
    families = (
        *(statecopy.ArgumentError, statecopy.PlanError, statecopy.HandleError, statecopy.SessionError),
        *(statecopy.CapacityError, statecopy.DeadlineExceeded, statecopy.Unavailable, statecopy.DeviceLost),
        *(statecopy.ClosedError, statecopy.ForkedError),
    )
    assert issubclass(statecopy.Error, RuntimeError)
    assert all(issubclass(family, statecopy.Error) for family in families)
    assert [family for family in families if issubclass(family, ValueError)] == [statecopy.ArgumentError]
    assert issubclass(statecopy.ForkedError, statecopy.ClosedError)


def test_layouts_that_differ_only_in_where_they_lie_serve_alike(client: statecopy.Client) -> None:
    caches = {f"at {offset}": Cache(Layout(dtype="uint8", offset=offset), seed=offset) for offset in range(1, 17)}
    plans = client.register({name: cache.states for name, cache in caches.items()}, max_selected=4)
    for name, cache in caches.items():
        assert bytes_of(plans[name].gather(int32(5, 0))) == cache.gathered([5, 0]), name


def test_an_empty_array_is_packed_of_no_rows(client: statecopy.Client) -> None:
    cache = statecopy.empty((4, 2, 3, 5), "float32")
    plan = client.register({"layer": cache}, max_selected=2)["layer"]
    nothing = np.zeros((0, 2, 3, 5), np.float32)
    plan.scatter(nothing, [])
    assert plan.gather([], out=nothing) is nothing


def test_flags_may_be_a_list_of_integers(client: statecopy.Client) -> None:
    cache = statecopy.empty((4, 2, 3, 5), "float32")
    np.asarray(cache)[:] = 7
    plan = client.register({"layer": cache}, max_selected=2)["layer"]
    packed = np.asarray(plan.gather([1, 2], [0, 3]))
    assert not packed[0].any()
    assert (packed[1] == 7).all()
