"""Which layers take part, what is refused, and that it is all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workers import AttentionLayer, KimiLayer, UpstreamLayer, caches, pages

import statecopy
import statecopy.torch
import statecopy.vllm
from daemon_process import Daemon, eventually
from statecopy.vllm import initialize_state_copy

Initialise = Callable[..., statecopy.vllm.StateCopy]


def layer(bound: Any, kind: type[KimiLayer] = KimiLayer) -> KimiLayer:
    made = kind()
    made.kv_cache = bound
    return made


def is_attached(*layers: Any) -> bool:
    """Whether all layers have a state copy; fails when some have."""
    found = {(one._ascend_kda_state_copy is not None, one._kda_state_copy_ready) for one in layers}
    assert len(found) == 1, f"half of the worker is published: {found}"
    attached, ready = found.pop()
    assert attached == ready
    return bool(ready)


@pytest.mark.parametrize(
    "as_bound",
    [tuple, list, lambda bound: [bound], lambda bound: [list(bound)]],
    ids=["tuple", "list", "list of a tuple", "list of a list"],
)
def test_a_marked_layer_is_found_however_its_caches_are_bound(initialise: Initialise, as_bound: Any) -> None:
    memory = pages(4)
    bound = caches(memory)
    marked = layer(as_bound(bound))
    handle = initialise({"a": marked})
    assert handle.layers == ("a",)
    assert handle.ready
    assert is_attached(marked)
    bound[1][2] = 3
    packed = marked._ascend_kda_state_copy.gather(bound[1], torch.tensor([2, 9]), torch.tensor([True, True]))
    assert packed[0].eq(3).all()
    assert not packed[1].any()


def test_caches_may_be_views_of_raw_pages(initialise: Initialise) -> None:
    # As MambaBase of vLLM cuts them: bytes of a page, one state after the other, each of its own type.
    raw = statecopy.torch.empty((6, 1, 1, 1024), torch.int8)
    cut = raw.squeeze(dim=(1, 2))
    convolution = cut[:, :96].view(torch.bfloat16).view(-1, 12, 4)
    state = cut[:, 96 : 96 + 512].view(torch.float32).view(-1, 2, 8, 8)
    marked = layer((convolution, state))
    initialise({"a": marked})
    marked._ascend_kda_state_copy.scatter(state, torch.ones(1, 2, 8, 8), torch.tensor([5]))
    assert state[5].eq(1).all()
    assert not raw[:5].any()
    assert not raw[5, 0, 0, :96].any()
    assert not raw[5, 0, 0, 96 + 512 :].any()


def test_an_unmarked_layer_is_left_alone(initialise: Initialise) -> None:
    attention, upstream = AttentionLayer(), layer(caches(pages(4)), UpstreamLayer)
    before = dict(vars(attention)), dict(vars(upstream))
    handle = initialise({"attention": attention, "upstream": upstream, "kimi": layer(caches(pages(4)))})
    assert handle.layers == ("kimi",)
    handle.close()
    assert (vars(attention), vars(upstream)) == before


def test_a_predicate_chooses_unmarked_layers_beside_the_marked_ones(initialise: Initialise) -> None:
    convolution, state = caches(pages(4))
    upstream = layer((convolution, state, convolution), UpstreamLayer)
    other = layer(caches(pages(4)), UpstreamLayer)
    marked = layer(caches(pages(4)))
    seen = []

    def choose(name: str, module: Any) -> bool:
        seen.append((name, module))
        return name == "upstream"

    handle = initialise({"upstream": upstream, "other": other, "marked": marked}, predicate=choose)
    assert handle.layers == ("upstream", "marked")
    assert is_attached(upstream, marked)
    assert "_ascend_kda_state_copy" not in vars(other)
    assert seen == [("upstream", upstream), ("other", other)]


def unbound() -> dict[str, Any]:
    convolution, state = caches(torch.zeros(4, 256))
    placeholder = torch.tensor([])
    return {
        "missing": None,
        "an empty tuple": (),
        "an empty list": [],
        "a tensor alone": state,
        "one cache": (convolution,),
        "a list of nothing": [None],
        "nothing second": (convolution, None),
        "placeholders": (placeholder, placeholder),
        "three caches of a marked layer": (convolution, state, convolution),
    }


@pytest.mark.parametrize("what", unbound())
def test_a_cache_that_is_not_bound_is_refused_by_the_layers_name(initialise: Initialise, what: str) -> None:
    bound, broken = layer(caches(pages(4))), layer(unbound()[what])
    with pytest.raises(statecopy.ArgumentError, match=r"kv_cache of layer 'b' is not bound") as caught:
        initialise({"a": bound, "b": broken})
    assert caught.value.about == "b"
    assert not is_attached(bound, broken)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ((torch.zeros(4, 3), torch.zeros(4, 3, 8)), r"shape \(4, 3, 8\).*\[N, H, V, K\]"),
        ([caches(torch.zeros(4, 256))] * 2, "2 virtual engines, and one is supported"),
    ],
    ids=["no state", "two engines"],
)
def test_caches_of_another_shape_are_refused(initialise: Initialise, bound: Any, message: str) -> None:
    broken = layer(bound)
    with pytest.raises(statecopy.ArgumentError, match=message):
        initialise({"a": broken})
    assert not is_attached(broken)


def test_a_layer_of_a_predicate_has_at_least_two_caches(initialise: Initialise) -> None:
    upstream = layer((caches(pages(4))[0],), UpstreamLayer)
    with pytest.raises(statecopy.ArgumentError, match="at least 2"):
        initialise({"a": upstream}, predicate=lambda name, module: True)
    assert not is_attached(upstream)


def test_a_layout_that_the_daemon_refuses_leaves_no_layer_attached(initialise: Initialise) -> None:
    convolution, state = caches(pages(4))
    good, bad = layer(caches(pages(4))), layer((convolution, state.transpose(2, 3)))
    with pytest.raises(statecopy.ArgumentError, match="LAYOUT_INVALID") as caught:
        initialise({"model.layers.0": good, "model.layers.1": bad})
    assert "model.layers.1" in str(caught.value)
    assert not is_attached(good, bad)


def test_a_failure_withdraws_what_an_earlier_initialisation_attached(initialise: Initialise) -> None:
    first, second = layer(caches(pages(4))), layer(caches(pages(4)))
    handle = initialise({"a": first, "b": second})
    held = first._ascend_kda_state_copy
    state = first.kv_cache[1]
    second.kv_cache = ()
    with pytest.raises(statecopy.ArgumentError, match="'b' is not bound"):
        initialise({"a": first, "b": second})
    assert not is_attached(first, second)
    assert not handle.ready
    with pytest.raises(statecopy.PlanError, match="replaced by a later initialisation"):
        held.gather(state, torch.tensor([0]), torch.tensor([True]))


def test_a_failure_leaves_no_plan_of_anybody_else_either(initialise: Initialise) -> None:
    good, bad = layer(caches(pages(4))), layer(())
    good._ascend_kda_state_copy, good._kda_state_copy_ready = object(), True
    with pytest.raises(statecopy.ArgumentError, match="'b' is not bound"):
        initialise({"a": good, "b": bad})
    assert not is_attached(good, bad)


def test_a_failure_ends_the_session_that_it_opened(daemon: Daemon) -> None:
    bad = layer(caches(torch.zeros(4, 256)))
    # Who holds the exception holds the frames that it came through.
    with pytest.raises(statecopy.HandleError, match=r"statecopy\.torch\.empty") as caught:
        initialize_state_copy({"a": bad}, 4, address=daemon.address)
    assert daemon.metric("statecopy_sessions_opened_total") == 1
    eventually("the session ends", lambda: daemon.metric("statecopy_sessions") == 0)
    assert caught.value.__traceback__ is not None
    assert not is_attached(bad)


@pytest.mark.parametrize("maximum", [0, -1, True, 1.5, "4"])
def test_a_limit_that_is_no_count_is_refused_and_leaves_nothing(initialise: Initialise, maximum: Any) -> None:
    marked = layer(caches(pages(4)))
    initialise({"a": marked})
    with pytest.raises(statecopy.ArgumentError, match="max_num_seqs") as caught:
        initialise({"a": marked}, max_num_seqs=maximum)
    assert isinstance(caught.value, ValueError)
    assert not is_attached(marked)


def test_no_marked_layer_needs_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATECOPY_ADDR", "unix:///nowhere/statecopyd.sock")
    with initialize_state_copy({"attention": AttentionLayer()}, 4) as handle:
        assert handle.layers == ()
        assert handle.client is None
        assert handle.ready
        handle.release()
        handle.rebind()
        assert handle.ready
    assert initialize_state_copy({}, 4).layers == ()


def test_without_a_daemon_nothing_is_attached() -> None:
    marked = layer(caches(pages(4)))
    with pytest.raises(statecopy.Unavailable):
        initialize_state_copy({"a": marked}, 4, address="unix:///nowhere/statecopyd.sock", wait_s=0.0)
    assert not is_attached(marked)


def test_a_second_initialisation_replaces_the_first(initialise: Initialise) -> None:
    marked = layer(caches(pages(2)))
    first = initialise({"a": marked})
    held, old = marked._ascend_kda_state_copy, marked.kv_cache[1]
    marked.kv_cache = caches(pages(4))
    second = initialise({"a": marked})
    assert not first.ready
    assert second.ready
    assert marked._ascend_kda_state_copy is not held
    first.close()
    assert is_attached(marked), "closing the first takes nothing from the second"
    with pytest.raises(statecopy.PlanError):
        held.scatter(old, torch.zeros(1, 2, 8, 8), torch.tensor([1]))
    marked.kv_cache[1][3] = 4
    packed = marked._ascend_kda_state_copy.gather(marked.kv_cache[1], torch.tensor([3]), torch.tensor([1]))
    assert packed.eq(4).all()


def test_layers_of_one_layout_keep_their_own_names_and_caches(initialise: Initialise) -> None:
    memory = pages(4, layers=2)
    one, other = layer(caches(memory, 0)), layer(caches(memory, 1))
    initialise({"model.layers.0": one, "model.layers.1": other})
    plans = [one._ascend_kda_state_copy.plan, other._ascend_kda_state_copy.plan]
    assert [plan.name for plan in plans] == ["model.layers.0", "model.layers.1"]
    assert plans[0].signature == plans[1].signature
    assert one._ascend_kda_state_copy.layer_name == "model.layers.0"
    for value, at in ((1.0, one), (2.0, other)):
        at._ascend_kda_state_copy.scatter(at.kv_cache[1], torch.full((1, 2, 8, 8), value), torch.tensor([2]))
    assert one.kv_cache[1][2].eq(1).all()
    assert other.kv_cache[1][2].eq(2).all()


def test_layers_of_several_groups_may_share_a_memory(initialise: Initialise) -> None:
    shared, alone = pages(6), pages(6)
    layers = {f"model.layers.{at}": layer(caches(memory)) for at, memory in enumerate((shared, alone, shared))}
    handle = initialise(layers)
    assert handle.layers == tuple(layers)
    assert is_attached(*layers.values())
    copies = [one._ascend_kda_state_copy for one in layers.values()]
    assert [copy.layer_name for copy in copies] == list(layers)
    assert [copy.plan.name for copy in copies] == ["model.layers.0", "model.layers.1", "model.layers.0"]
    # Each group has rows of its own.
    for row, (name, one) in enumerate(layers.items(), start=1):
        final = torch.full((1, 2, 8, 8), float(row))
        layers[name]._ascend_kda_state_copy.scatter(one.kv_cache[1], final, torch.tensor([row]))
    assert caches(shared)[1][:, 0, 0, 0].tolist() == [0, 1, 0, 3, 0, 0]
    assert caches(alone)[1][:, 0, 0, 0].tolist() == [0, 0, 2, 0, 0, 0]


def test_layers_that_share_a_memory_wake_together(initialise: Initialise) -> None:
    first, second = layer(caches(pages(4))), KimiLayer()
    second.kv_cache = caches(first.kv_cache[1]._base)
    handle = initialise({"a": first, "b": second})
    handle.release()
    first.kv_cache, second.kv_cache = caches(pages(4)), caches(pages(4))
    with pytest.raises(statecopy.ArgumentError, match="layer 'b' was that of layer 'a'"):
        handle.rebind()
    assert not handle.ready
    memory = pages(4)
    first.kv_cache, second.kv_cache = caches(memory), caches(memory)
    handle.rebind()
    second._ascend_kda_state_copy.scatter(second.kv_cache[1], torch.ones(1, 2, 8, 8), torch.tensor([3]))
    assert first.kv_cache[1][3].eq(1).all()


def test_layers_that_overlap_in_part_are_refused(initialise: Initialise) -> None:
    convolution, state = caches(pages(4))
    one, other = layer((convolution, state)), layer((convolution, state[1:]))
    with pytest.raises(statecopy.ArgumentError, match="OVERLAP"):
        initialise({"a": one, "b": other})
    assert not is_attached(one, other)


def test_a_client_of_the_callers_is_used_and_left_open(addressed: Daemon) -> None:
    marked = layer(caches(pages(4)))
    with statecopy.torch.connect() as client:
        with initialize_state_copy({"a": marked}, 4, client=client) as handle:
            assert handle.client is client
        assert not is_attached(marked)
        client.ping()
        with initialize_state_copy({"a": marked}, 4, client=client):
            assert is_attached(marked)
    with pytest.raises(statecopy.ArgumentError, match="client and address"):
        initialize_state_copy({"a": marked}, 4, client=client, address="unix:///nowhere")


def test_arguments_that_do_not_fit_are_named(addressed: Daemon) -> None:
    marked = layer(caches(pages(4)))
    with pytest.raises(statecopy.ArgumentError, match="null_row is 'zero', and one of 'as_is', 'skip'"):
        initialize_state_copy({"a": marked}, 4, null_row="zero")  # type: ignore[arg-type]
    with pytest.raises(statecopy.ArgumentError, match="the name of a layer is of type int"):
        initialize_state_copy({0: marked}, 4)  # type: ignore[dict-item]
    assert not is_attached(marked)


def test_a_module_with_parameters_takes_it_as_any_other(initialise: Initialise) -> None:
    class Module(torch.nn.Module):
        _requires_kda_state_copy = True

    module: Any = Module()
    module.kv_cache = caches(pages(4))
    handle = initialise({"a": module, "b": SimpleNamespace(kv_cache=None)})
    assert module._kda_state_copy_ready
    handle.close()
    assert module._ascend_kda_state_copy is None
    assert not list(module.parameters())
