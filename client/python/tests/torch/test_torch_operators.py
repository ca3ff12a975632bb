"""The operators: what a traced model holds, what their fakes check, and where they find their plan."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses import CrossRefFakeMode
from torch._subclasses.fake_tensor import FakeTensorMode

import statecopy
import statecopy.torch
from torch_oracle import DTYPES, FLAG_DTYPES, INDEX_DTYPES, Cache, int32, int64, plan_of, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="eager", fullgraph=True, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_a_compiled_prefill_copies_as_an_eager_one(
    client: statecopy.torch.Client, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    cache = Cache(dtype=dtype)
    cache.state.copy_(torch.randn(cache.shape))
    cache.expected.copy_(cache.memory)
    plans = client.register({"layers.0": cache.state}, max_selected=16)
    plan = plans["layers.0"]

    def prefill(indices: torch.Tensor, flags: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        packed = plan.gather(indices, flags)
        plan.scatter(packed + final, indices)
        return packed * 1

    traced = compiled(prefill)
    rows = torch.tensor([4, -1, 0, 6, 3, 1, 2, 5], dtype=index_dtype)
    with statecopy.torch.forward_context(plans):
        for selected in (3, 5, 0, 1, 8, 2):
            indices, flags = rows[:selected], torch.arange(selected) % 3 != 1
            final = torch.randn(selected, 2, 3, 5).to(dtype)
            expected = cache.gathered(indices, flags)
            assert torch.equal(traced(indices, flags, final), expected), f"{selected} rows"
            cache.scatter(expected + final, indices)
            cache.check()


def test_a_number_of_rows_is_a_symbol_that_no_guard_fixes(client: statecopy.torch.Client) -> None:
    plan = plan_of(client, Cache())
    seen = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        seen.append([node.meta["example_value"].shape for node in graph.graph.nodes if "kda" in str(node.target)])
        return graph.forward

    def gather(indices: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        return plan.gather(indices, flags)

    traced = torch.compile(gather, backend=backend, fullgraph=True)
    with statecopy.torch.forward_context({"layers.0": plan}):
        for selected in (2, 7, 0, 1, 5):
            indices, flags = torch.zeros(selected, dtype=torch.int32), torch.ones(selected, dtype=torch.int64)
            for tensor in (indices, flags):
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
            assert traced(indices, flags).shape == (selected, 2, 3, 5)
    [[shape]] = seen
    assert isinstance(shape[0], torch.SymInt)
    assert tuple(shape[1:]) == (2, 3, 5)


def test_the_operators_keep_their_schemas() -> None:
    gather = torch.ops.statecopy.kda_state_gather.default
    scatter = torch.ops.statecopy.kda_state_scatter.default
    assert str(gather._schema) == (
        "statecopy::kda_state_gather(Tensor state, Tensor indices, Tensor? flags, str layer_name) -> Tensor"
    )
    assert str(scatter._schema) == (
        "statecopy::kda_state_scatter(Tensor(a!) state, Tensor packed, Tensor indices, str layer_name) -> ()"
    )


@pytest.mark.parametrize("flags", [None, torch.tensor([[1], [0], [1]])], ids=["no flags", "flags"])
def test_a_fake_tells_what_the_operator_gives(client: statecopy.torch.Client, flags: torch.Tensor | None) -> None:
    cache = Cache()
    plans = client.register({"layers.0": cache.state}, max_selected=8)
    indices = int32(1, 5, -1)
    with statecopy.torch.forward_context(plans), CrossRefFakeMode():
        # The mode compares each result with what the fake told of it.
        packed = torch.ops.statecopy.kda_state_gather(cache.state, indices, flags, "layers.0")
        torch.ops.statecopy.kda_state_scatter(cache.state, packed, indices, "layers.0")
    assert same_bits(packed, cache.gathered(indices, flags))
    cache.scatter(packed, indices)
    cache.check()


def test_a_scatter_is_kept_in_a_graph_though_it_returns_nothing(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)

    def backend(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph.forward

    def scatter(packed: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        plan.scatter(packed, indices)
        return indices + 1

    final = cache.packed(2)
    with statecopy.torch.forward_context({"layers.0": plan}):
        torch.compile(scatter, backend=backend, fullgraph=True)(final, int32(1, 2))
    cache.scatter(final, int32(1, 2))
    cache.check()


def test_a_backend_that_copies_the_state_cannot_lose_a_write(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plan = plan_of(client, cache)
    final = cache.packed(2)

    def scatter(packed: torch.Tensor, indices: torch.Tensor) -> None:
        plan.scatter(packed, indices)

    traced, raised = torch.compile(scatter, backend="aot_eager", fullgraph=True), None
    with statecopy.torch.forward_context({"layers.0": plan}):
        try:
            traced(final, int32(1, 2))
        except statecopy.ArgumentError as error:
            raised = error
    if raised is None:
        cache.scatter(final, int32(1, 2))
    else:
        assert raised.code == "SIGNATURE_MISMATCH"
    cache.check()


class TestFakes:
    """Everything is told from metadata; no plan and no pointer is needed."""

    @staticmethod
    def gather(state: torch.Tensor, indices: torch.Tensor, flags: torch.Tensor | None = None) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.statecopy.kda_state_gather(state, indices, flags, "layers.0")
        return packed

    @staticmethod
    def scatter(state: torch.Tensor, packed: torch.Tensor, indices: torch.Tensor) -> None:
        torch.ops.statecopy.kda_state_scatter(state, packed, indices, "layers.0")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_has_a_packed_tensor_of_its_own(self, dtype: torch.dtype) -> None:
        with FakeTensorMode():
            state = torch.empty(6 * 64, dtype=dtype).as_strided((6, 2, 3, 5), (64, 15, 5, 1))
            for index_dtype in INDEX_DTYPES:
                for selected in (0, 1, 4):
                    indices = torch.empty(selected, dtype=index_dtype)
                    packed = self.gather(state, indices)
                    assert (packed.dtype, tuple(packed.shape)) == (dtype, (selected, 2, 3, 5))
                    assert packed.is_contiguous()
                    self.scatter(state, packed, indices)
            for flag_dtype in FLAG_DTYPES:
                self.gather(state, torch.empty(4, dtype=torch.int32), torch.empty(2, 2, dtype=flag_dtype))

    @pytest.mark.parametrize(
        ("state", "words"),
        [
            (lambda: torch.empty(6, 2, 15), "3 axes"),
            (lambda: torch.empty(0, 2, 3, 5), "0 rows"),
            (lambda: torch.empty(6, 2, 0, 5), "the size 0"),
            (lambda: torch.empty(6, 2, 3, 10)[..., ::2], "axis 3 .* stride 2"),
            (lambda: torch.empty(6, 2, 5, 3).transpose(2, 3), "axis 3 .* stride 3"),
            (lambda: torch.empty(6, 2, 6, 5)[:, :, ::2], "axis 2 .* stride 10"),
            (lambda: torch.empty(1, 2, 3, 5).expand(6, 2, 3, 5), "page stride of state is 0"),
            (lambda: torch.empty(64).as_strided((3, 2, 3, 5), (29, 15, 5, 1)), "page stride of state is 29"),
            (lambda: torch.empty(6, 2, 3, 5, dtype=torch.complex128), "16 bytes"),
        ],
    )
    def test_a_state_that_is_none_is_refused(self, state: Callable[[], torch.Tensor], words: str) -> None:
        with FakeTensorMode(), pytest.raises(statecopy.ArgumentError, match=words) as caught:
            self.gather(state(), torch.empty(2, dtype=torch.int32))
        assert caught.value.code == "LAYOUT_INVALID"

    def test_an_axis_of_one_may_have_any_stride(self) -> None:
        with FakeTensorMode():
            state = torch.empty(64).as_strided((2, 1, 3, 5), (32, 7, 5, 1))
            assert self.gather(state, torch.empty(2, dtype=torch.int32)).shape == (2, 1, 3, 5)

    @pytest.mark.parametrize(
        ("indices", "code"),
        [
            (lambda: torch.empty(2, 1, dtype=torch.int32), "INDEX_TYPE"),
            (lambda: torch.empty(2), "INDEX_TYPE"),
            (lambda: torch.empty(2, dtype=torch.int16), "INDEX_TYPE"),
            (lambda: torch.empty(2, dtype=torch.int32, device="cuda"), "DEVICE_NOT_VISIBLE"),
        ],
    )
    def test_indices_that_do_not_fit_are_refused(self, indices: Callable[[], torch.Tensor], code: str) -> None:
        with FakeTensorMode(), pytest.raises(statecopy.ArgumentError) as caught:
            self.gather(torch.empty(6, 2, 3, 5), indices())
        assert caught.value.code == code
        with FakeTensorMode(), pytest.raises(statecopy.ArgumentError) as caught:
            self.scatter(torch.empty(6, 2, 3, 5), torch.empty(2, 2, 3, 5), indices())
        assert caught.value.code == code

    @pytest.mark.parametrize(
        ("flags", "code"),
        [
            (lambda: torch.empty(3, dtype=torch.bool), "FLAGS_MISMATCH"),
            (lambda: torch.empty(2), "FLAGS_MISMATCH"),
            (lambda: torch.empty(2, dtype=torch.complex64), "FLAGS_MISMATCH"),
            (lambda: torch.empty(2, dtype=torch.bool, device="cuda"), "DEVICE_NOT_VISIBLE"),
        ],
    )
    def test_flags_that_do_not_fit_are_refused(self, flags: Callable[[], torch.Tensor], code: str) -> None:
        with FakeTensorMode(), pytest.raises(statecopy.ArgumentError) as caught:
            self.gather(torch.empty(6, 2, 3, 5), torch.empty(2, dtype=torch.int64), flags())
        assert caught.value.code == code

    @pytest.mark.parametrize(
        ("packed", "code"),
        [
            (lambda: torch.empty(3, 2, 3, 5), "PACKED_MISMATCH"),
            (lambda: torch.empty(2, 2, 3, 4), "PACKED_MISMATCH"),
            (lambda: torch.empty(2, 30), "PACKED_MISMATCH"),
            (lambda: torch.empty(2, 2, 3, 5, device="cuda"), "DEVICE_NOT_VISIBLE"),
        ],
    )
    def test_packed_that_does_not_fit_is_refused(self, packed: Callable[[], torch.Tensor], code: str) -> None:
        with FakeTensorMode(), pytest.raises(statecopy.ArgumentError) as caught:
            self.scatter(torch.empty(6, 2, 3, 5), packed(), torch.empty(2, dtype=torch.int64))
        assert caught.value.code == code

    def test_packed_of_another_dtype_is_converted_later(self) -> None:
        with FakeTensorMode():
            state = torch.empty(6, 2, 3, 5, dtype=torch.bfloat16)
            self.scatter(state, torch.empty(2, 2, 3, 5), torch.empty(2, dtype=torch.int64))


class TestLayers:
    """A plan is found by its layer's name, in the forward context, and nowhere else."""

    def test_two_layers_of_equal_layout_keep_their_own_names(self, client: statecopy.torch.Client) -> None:
        caches = {f"layers.{layer}": Cache(seed=layer) for layer in range(2)}
        plans = client.register({name: cache.state for name, cache in caches.items()}, max_selected=4)

        def both(indices: torch.Tensor) -> list[torch.Tensor]:
            return [plan.gather(indices) for plan in plans.values()]

        with statecopy.torch.forward_context(plans):
            for packed, cache in zip(compiled(both)(int32(1, 2)), caches.values(), strict=True):
                assert same_bits(packed, cache.gathered(int32(1, 2)))

    def test_a_layer_of_the_context_holds_its_plan(self, client: statecopy.torch.Client) -> None:
        cache = Cache()
        plan = plan_of(client, cache)
        layer = SimpleNamespace(_ascend_kda_state_copy=plan)
        adapted = SimpleNamespace(_ascend_kda_state_copy=SimpleNamespace(plan=plan))
        for holder in (layer, adapted):
            with statecopy.torch.forward_context({"layers.0": holder}):
                packed = torch.ops.statecopy.kda_state_gather(cache.state, int32(1), None, "layers.0")
                assert same_bits(packed, cache.gathered(int32(1)))
        with (
            statecopy.torch.forward_context({"layers.0": SimpleNamespace()}),
            pytest.raises(statecopy.PlanError, match=r"layers\.0.*no plan"),
        ):
            torch.ops.statecopy.kda_state_gather(cache.state, int32(1), None, "layers.0")

    def test_vllms_own_context_is_asked(self, client: statecopy.torch.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = Cache()
        context = SimpleNamespace(no_compile_layers={"layers.0": plan_of(client, cache)})
        vllm = SimpleNamespace(get_forward_context=lambda: context, is_forward_context_available=lambda: True)
        monkeypatch.setitem(sys.modules, "vllm.forward_context", vllm)
        packed = torch.ops.statecopy.kda_state_gather(cache.state, int32(1), None, "layers.0")
        assert same_bits(packed, cache.gathered(int32(1)))

    def test_outside_of_a_forward_pass_or_under_another_name_there_is_none(
        self, client: statecopy.torch.Client
    ) -> None:
        cache = Cache()
        plan = plan_of(client, cache)
        gather = torch.ops.statecopy.kda_state_gather
        with pytest.raises(statecopy.ArgumentError, match="no forward context"):
            gather(cache.state, int32(1), None, "layers.0")
        with (
            statecopy.torch.forward_context({"layers.0": plan}),
            pytest.raises(statecopy.ArgumentError, match=r"'layers\.1'.*knows layers\.0"),
        ):
            gather(cache.state, int32(1), None, "layers.1")
        # An exception leaves the context as well.
        with pytest.raises(statecopy.ArgumentError, match="no forward context"):
            gather(cache.state, int32(1), None, "layers.0")

    def test_a_context_is_its_threads_own(self, client: statecopy.torch.Client) -> None:
        cache = Cache()
        plan = plan_of(client, cache)
        raised: list[BaseException] = []

        def elsewhere() -> None:
            try:
                torch.ops.statecopy.kda_state_gather(cache.state, int32(1), None, "layers.0")
            except statecopy.ArgumentError as error:
                raised.append(error)

        with statecopy.torch.forward_context({"layers.0": plan}):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert len(raised) == 1

    def test_a_state_that_the_plan_was_not_bound_with_is_refused(self, client: statecopy.torch.Client) -> None:
        cache, other = Cache(), Cache(seed=2)
        plan = plan_of(client, cache)
        wider = cache.state.as_strided((3, 2, 3, 5), (78, 15, 5, 1))
        with statecopy.torch.forward_context({"layers.0": plan}):
            for state in (other.state, wider, cache.state.view(torch.int32), cache.state[1:]):
                with pytest.raises(statecopy.ArgumentError) as caught:
                    torch.ops.statecopy.kda_state_gather(state, int32(1), None, "layers.0")
                assert caught.value.code == "SIGNATURE_MISMATCH"
            same = cache.state.view(cache.state.shape)
            torch.ops.statecopy.kda_state_scatter(same, final := cache.packed(1), int32(1), "layers.0")
        cache.scatter(final, int32(1))
        cache.check()

    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_a_plan_without_a_layer_cannot_be_compiled(self, client: statecopy.torch.Client, fullgraph: bool) -> None:
        cache = Cache()
        plan = plan_of(client, cache, layers=False)
        assert plan.layer is None
        assert same_bits(plan.gather(int32(1)), cache.gathered(int32(1)))
        traced = torch.compile(lambda indices: plan.gather(indices), backend="eager", fullgraph=fullgraph)
        with pytest.raises(RuntimeError, match="registered without a layer"):
            traced(int32(1))

    def test_what_only_an_eager_call_takes_cannot_be_compiled(self, client: statecopy.torch.Client) -> None:
        cache = Cache((6, 2, 4, 4))
        plans = client.register({"layers.0": cache.state}, max_selected=4, sets={"kda": ["layers.0"]})
        plan, kda = plans["layers.0"], plans.sets["kda"]
        with statecopy.torch.forward_context(plans):
            for function in (lambda i: plan.gather(i, lane=1), kda.gather_all):
                with pytest.raises(torch._dynamo.exc.Unsupported):
                    compiled(function)(int32(1))


@pytest.mark.parametrize("is_taken", [False, True])
def test_vllms_names_are_defined_only_where_nobody_has(is_taken: bool) -> None:
    script = """
import sys, torch, statecopy.torch
from statecopy.torch import operators
taken = sys.argv[1] == "True"
if taken:
    theirs = torch.library.Library("vllm", "FRAGMENT")
    theirs.define("kda_state_gather(Tensor state) -> Tensor")
assert operators.define("vllm") is not taken
assert operators.define("vllm") is not taken
assert hasattr(torch.ops.vllm, "kda_state_scatter") is not taken
count = len(torch.ops.vllm.kda_state_gather.default._schema.arguments)
assert count == (1 if taken else 4), count
# Whoever comes later gets the names, once they were given back.
operators.withdraw("vllm")
if not taken:
    theirs = torch.library.Library("vllm", "FRAGMENT")
    theirs.define("kda_state_gather(Tensor state) -> Tensor")
    assert len(torch._C._get_schema("vllm::kda_state_gather", "").arguments) == 1
"""
    subprocess.run([sys.executable, "-c", script, str(is_taken)], check=True, timeout=100)


def test_the_names_of_vllm_serve_like_our_own(client: statecopy.torch.Client) -> None:
    cache = Cache()
    plans = client.register({"layers.0": cache.state}, max_selected=4)
    with statecopy.torch.forward_context(plans):
        packed = torch.ops.vllm.kda_state_gather(cache.state, int64(1, -1), torch.ones(2, dtype=torch.bool), "layers.0")
        torch.ops.vllm.kda_state_scatter(cache.state, packed, int64(3, 4), "layers.0")
    cache.scatter(packed, int64(3, 4))
    cache.check()
