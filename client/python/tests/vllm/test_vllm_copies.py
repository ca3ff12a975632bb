"""What a layer calls in prefill: the checks around its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from workers import HEADS, WIDTH, KimiLayer, caches, pages

import statecopy
import statecopy.torch
import statecopy.vllm

Initialise = Callable[..., statecopy.vllm.StateCopy]
TRUE = torch.tensor([True])


class Bench:
    """One layer whose rows hold their own number, and what is attached to it."""

    def __init__(self, initialise: Initialise, *, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.memory = pages(6, dtype=dtype)
        self.memory.fill_(-1)
        self.layer = KimiLayer()
        self.layer.kv_cache = caches(self.memory)
        self.state = self.layer.kv_cache[1]
        for row in range(6):
            self.state[row] = row
        self.handle = initialise({"model.layers.3": self.layer}, **options)
        self.copy: statecopy.vllm.LayerStateCopy = self.layer._ascend_kda_state_copy

    def gathers(self) -> int:
        assert self.handle.client is not None
        return self.handle.client.counters()["gathers"]


def full(value: float, count: int = 1) -> torch.Tensor:
    return torch.full((count, HEADS, WIDTH, WIDTH), value, dtype=torch.float32)


def test_a_prefill_gathers_and_scatters_its_own_rows(initialise: Initialise) -> None:
    bench = Bench(initialise)
    before = bench.memory.clone()
    rows = torch.tensor([4, 2, -1], dtype=torch.int32)
    packed = bench.copy.gather(bench.state, rows, torch.tensor([True, False, True]))
    assert packed.shape == (3, HEADS, WIDTH, WIDTH)
    assert packed[0].eq(4).all()
    assert not packed[1:].any()
    assert torch.equal(bench.memory, before), "a gather writes nothing to the cache"
    bench.copy.scatter(bench.state, full(9, 3), rows)
    caches(before)[1][[4, 2]] = 9
    assert torch.equal(bench.memory, before), "a scatter writes its rows' payloads alone"


def test_a_gather_without_flags_says_what_to_pass(initialise: Initialise) -> None:
    bench = Bench(initialise)
    with pytest.raises(statecopy.ArgumentError, match="last tenant") as caught:
        bench.copy.gather(bench.state, torch.tensor([1]), None)
    assert caught.value.about == "flags"
    assert "has_initial_state" in caught.value.remedy
    assert bench.gathers() == 0


def test_a_state_that_is_not_the_bound_cache_is_refused(initialise: Initialise) -> None:
    bench = Bench(initialise)
    for other in (bench.state.clone(), bench.state[:5], bench.state[1:], bench.state.view(torch.int32)):
        with pytest.raises(statecopy.ArgumentError) as caught:
            bench.copy.gather(other, torch.tensor([1]), TRUE)
        assert caught.value.about == "state"
        assert caught.value.code == "SIGNATURE_MISMATCH"
        with pytest.raises(statecopy.ArgumentError):
            bench.copy.scatter(other, full(1), torch.tensor([1]))
    assert bench.state[1].eq(1).all()


def test_a_view_of_the_bound_cache_will_do(initialise: Initialise) -> None:
    bench = Bench(initialise)
    assert bench.copy.gather(bench.state[:], torch.tensor([5]), TRUE).eq(5).all()


def test_a_cache_that_was_given_other_storage_is_refused(initialise: Initialise) -> None:
    bench = Bench(initialise)
    other = caches(pages(6))[1]
    bench.state.set_(other.untyped_storage(), other.storage_offset(), other.shape, other.stride())
    with pytest.raises(statecopy.ArgumentError, match="begins at") as caught:
        bench.copy.gather(bench.state, torch.tensor([1]), TRUE)
    assert "rebind" in caught.value.remedy


def test_row_0_is_a_row_like_any_other(initialise: Initialise) -> None:
    bench = Bench(initialise)
    bench.copy.scatter(bench.state, full(7), torch.tensor([0]))
    assert bench.copy.gather(bench.state, torch.tensor([0]), TRUE).eq(7).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_0_is_padding_on_request(initialise: Initialise, dtype: torch.dtype) -> None:
    bench = Bench(initialise, null_row="skip", debug=True)
    bench.state[0] = 5
    rows = torch.tensor([0, 3, 0], dtype=dtype)
    packed = bench.copy.gather(bench.state, rows, torch.tensor([True, True, True]))
    assert not packed[0].any()
    assert packed[1].eq(3).all()
    assert not packed[2].any()
    bench.copy.scatter(bench.state, full(9, 3), rows)
    assert bench.state[0].eq(5).all()
    assert bench.state[3].eq(9).all()
    assert rows.tolist() == [0, 3, 0], "the caller's indices are left alone"
    assert bench.copy.gather(bench.state, rows[:0], torch.tensor([], dtype=torch.bool)).shape[0] == 0


def test_padding_is_mapped_without_a_value_on_the_host(initialise: Initialise) -> None:
    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.called: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.called.append(str(func))
            return func(*args, **(kwargs or {}))

    bench = Bench(initialise, null_row="skip")
    rows = torch.tensor([0, 3])
    with Watch() as watch:
        bench.copy.gather(bench.state, rows, torch.tensor([True, True]))
        bench.copy.scatter(bench.state, full(9, 2), rows)
    assert any("where" in name for name in watch.called)
    assert not [name for name in watch.called if "_local_scalar_dense" in name or "nonzero" in name]


def test_debugging_refuses_row_0_before_anything_moves(initialise: Initialise) -> None:
    bench = Bench(initialise, debug=True)
    with pytest.raises(statecopy.ArgumentError, match="null block") as caught:
        bench.copy.gather(bench.state, torch.tensor([3, 0]), torch.tensor([True, True]))
    assert "null_row='skip'" in caught.value.remedy
    with pytest.raises(statecopy.ArgumentError, match="null block"):
        bench.copy.scatter(bench.state, full(9, 2), torch.tensor([3, 0]))
    assert bench.state[3].eq(3).all()
    assert bench.gathers() == 0


def test_debugging_refuses_a_repeated_destination(initialise: Initialise) -> None:
    bench = Bench(initialise, debug=True)
    with pytest.raises(statecopy.Error, match="ROW_INVALID"):
        bench.copy.scatter(bench.state, full(9, 2), torch.tensor([3, 3]))
    assert bench.state[3].eq(3).all()


def test_more_rows_than_the_scheduler_has_are_refused(initialise: Initialise) -> None:
    bench = Bench(initialise, max_num_seqs=2)
    with pytest.raises(statecopy.ArgumentError, match="SELECTED_TOO_LARGE"):
        bench.copy.gather(bench.state, torch.tensor([1, 2, 3]), torch.tensor([True, True, True]))
    assert bench.copy.gather(bench.state, torch.tensor([1, 2]), torch.tensor([True, True]))[1].eq(2).all()


def test_a_final_state_of_another_dtype_or_layout_is_brought_into_the_caches(initialise: Initialise) -> None:
    bench = Bench(initialise, dtype=torch.bfloat16)
    packed = bench.copy.gather(bench.state, torch.tensor([3]), TRUE)
    assert packed.dtype == torch.bfloat16
    final = torch.rand(1, HEADS, WIDTH, WIDTH).transpose(2, 3)
    bench.copy.scatter(bench.state, final, torch.tensor([3]))
    assert torch.equal(bench.state[3], final[0].to(torch.bfloat16))


class Prefill(torch.nn.Module):
    """Two layers, as a model that is compiled as a whole has them."""

    def __init__(self, layers: dict[str, KimiLayer]) -> None:
        super().__init__()
        self.copied = list(layers.values())

    def forward(self, rows: torch.Tensor, has_state: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(rows.shape[0], HEADS, WIDTH, WIDTH)
        for layer in self.copied:
            total = total + layer._run_prefill(total + 1, layer.kv_cache[1], rows, has_state)
        return total


def compiled(initialise: Initialise, **options: Any) -> tuple[dict[str, KimiLayer], Any]:
    memory = pages(8, layers=2)
    layers = {f"model.layers.{at}": KimiLayer() for at in range(2)}
    for at, layer in enumerate(layers.values()):
        layer.kv_cache = caches(memory, at)
    initialise(layers, **options)
    return layers, torch.compile(Prefill(layers), backend="eager", fullgraph=True, dynamic=True)


def test_a_compiled_prefill_finds_each_layers_plan_in_the_forward_context(initialise: Initialise) -> None:
    layers, model = compiled(initialise)
    with statecopy.torch.forward_context(layers):
        for rows in ([3, 5], [5, 3, 6], [1], []):
            indices = torch.tensor(rows, dtype=torch.int32)
            known = torch.tensor([row in (3, 5) for row in rows], dtype=torch.bool)
            states = [layer.kv_cache[1].clone() for layer in layers.values()]
            total = torch.zeros(len(rows), HEADS, WIDTH, WIDTH)
            for state in states:
                initial = state[indices.long()] * known[:, None, None, None]
                state[indices.long()] = initial + total + 1
                total = total + initial
            assert torch.equal(model(indices, known), total)
            for layer, state in zip(layers.values(), states, strict=True):
                assert torch.equal(layer.kv_cache[1], state)


def test_padding_and_missing_flags_are_seen_in_compiled_code_too(initialise: Initialise) -> None:
    layers, model = compiled(initialise, null_row="skip")
    first = layers["model.layers.0"]
    first.kv_cache[1][0] = 5
    with statecopy.torch.forward_context(layers):
        total = model(torch.tensor([0, 2]), torch.tensor([True, True]))
    assert not total[0].any()
    assert first.kv_cache[1][0].eq(5).all()
    assert first.kv_cache[1][2].eq(1).all()
    with statecopy.torch.forward_context(layers), pytest.raises(RuntimeError, match="last tenant"):
        model(torch.tensor([0, 2]), None)


def test_what_was_compiled_stays_valid_over_sleep(initialise: Initialise) -> None:
    layers, model = compiled(initialise)
    handle = layers["model.layers.0"]._ascend_kda_state_copy.owner
    rows, has_state = torch.tensor([2, 3]), torch.tensor([True, True])
    with statecopy.torch.forward_context(layers):
        model(rows, has_state)
        handle.release()
        memory = pages(8, layers=2)
        for at, layer in enumerate(layers.values()):
            layer.kv_cache = caches(memory, at)
        handle.rebind()
        assert not model(rows, has_state).any()
        assert model(rows, has_state)[0].eq(2).all()
