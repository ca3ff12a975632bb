"""The order of a worker's life, with the very classes of the page, over stand-ins of vLLM's runners."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import page
import pytest
import torch
from workers import AttentionLayer, KimiLayer, Runner, UpstreamLayer, V1Runner, V2Runner, Worker

import statecopy
import statecopy.vllm
from daemon_process import Daemon

RUNNERS = pytest.mark.parametrize("version", ["V1", "V2"])


class Written:
    """The page's classes over the stand-ins, which write down each initialisation too."""

    def __init__(self) -> None:
        self.names = page.run(GPUModelRunnerV1=V1Runner, GPUModelRunnerV2=V2Runner, GPUWorker=Worker)
        self.initialise = self.names["initialize_state_copy"]

    def worker(self, version: str, layers: dict[str, Any]) -> Any:
        runner = self.names[f"StateCopyRunner{version}"](layers)

        def initialise(*arguments: Any, **options: Any) -> statecopy.vllm.StateCopy:
            runner.happened.append("initialise")
            handle: statecopy.vllm.StateCopy = self.initialise(*arguments, **options)
            return handle

        self.names["initialize_state_copy"] = initialise
        return self.names["SleepingWorker"](runner)


@pytest.fixture
def written(addressed: Daemon) -> Written:
    return Written()


def kimi(count: int = 2) -> dict[str, Any]:
    layers: dict[str, Any] = {f"model.layers.{at}.self_attn": KimiLayer() for at in range(count)}
    return {"model.layers.9.attn": AttentionLayer(), **layers}


@RUNNERS
def test_a_worker_initialises_after_binding_and_before_all_else(written: Written, version: str) -> None:
    worker = written.worker(version, kimi())
    worker.initialize_from_config(8)
    worker.compile_or_warm_up_model()
    first = worker.execute_model([3, 5], [False, False])
    second = worker.execute_model([5, 3, 6], [True, True, False])
    worker.model_runner.state_copy.close()

    assert worker.model_runner.happened == ["bind", "initialise", "warm-up", "capture", "request", "request"]
    for initial in first:
        assert not initial.any(), "a new request begins with zeros"
    for initial in second:
        assert initial[:2].eq(1).all()
        assert not initial[2].any()


@RUNNERS
@pytest.mark.parametrize("step", ["warm_up", "capture", "execute"])
def test_a_layer_that_is_not_initialised_refuses(version: str, step: str) -> None:
    runner: Runner = {"V1": V1Runner, "V2": V2Runner}[version](kimi())
    runner.initialize_kv_cache(8)  # type: ignore[attr-defined]
    arguments = ([3], [False]) if step == "execute" else ()
    with pytest.raises(RuntimeError, match="not initialised"):
        getattr(runner, step)(*arguments)


@RUNNERS
def test_an_initialisation_before_binding_is_refused(addressed: Daemon, version: str) -> None:
    runner: Runner = {"V1": V1Runner, "V2": V2Runner}[version](kimi())
    with pytest.raises(statecopy.ArgumentError, match="not bound") as caught:
        statecopy.vllm.initialize_state_copy(runner.compilation_config.static_forward_context, 4)
    assert "after the runner has bound its caches" in caught.value.remedy
    with pytest.raises(RuntimeError, match="not initialised"):
        runner.warm_up()


def test_the_cache_of_profiling_is_thrown_away_and_the_real_one_replaces_it(written: Written) -> None:
    worker = written.worker("V1", kimi())
    runner = worker.model_runner
    thrown: list[weakref.ref[torch.UntypedStorage]] = []
    bind = runner._bind

    def watched(rows: int) -> None:
        bind(rows)
        thrown.append(weakref.ref(runner.kda_layers[0].kv_cache[0][1].untyped_storage()))

    runner._bind = watched
    runner.profile_cudagraph_memory()
    gc.collect()
    assert thrown[0]() is None, "what was registered while profiling is held"
    with pytest.raises(RuntimeError, match="not initialised"):
        runner.warm_up()

    worker.initialize_from_config(8)
    worker.compile_or_warm_up_model()
    worker.execute_model([7], [False])
    assert worker.execute_model([7], [True])[0].eq(1).all()
    runner.state_copy.close()
    assert runner.happened == [
        *("bind", "initialise", "capture", "throw away", "warm-up"),
        *("bind", "initialise", "warm-up", "capture", "request", "request"),
    ]


@RUNNERS
def test_a_worker_sleeps_and_goes_on_with_new_memory(written: Written, version: str) -> None:
    worker = written.worker(version, kimi())
    worker.initialize_from_config(8)
    worker.execute_model([3], [False])
    worker.sleep()
    with pytest.raises(RuntimeError):
        worker.execute_model([3], [True])
    worker.wake_up(["weights"])
    assert not worker.model_runner.state_copy.ready
    worker.wake_up(["kv_cache"])
    assert not worker.execute_model([3], [True])[0].any(), "what was in the cache went with its memory"
    assert worker.execute_model([3], [True])[0].eq(1).all()
    worker.model_runner.state_copy.close()


@RUNNERS
def test_a_stage_without_such_layers_starts_without_a_daemon(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATECOPY_ADDR", "unix:///nowhere/statecopyd.sock")
    worker = Written().worker(version, {"model.layers.9.attn": AttentionLayer()})
    worker.initialize_from_config(8)
    worker.compile_or_warm_up_model()
    worker.sleep()
    worker.wake_up()
    assert worker.model_runner.state_copy.ready
    worker.model_runner.state_copy.close()


def test_what_else_the_page_shows_works(written: Written) -> None:
    class KimiDeltaAttention(UpstreamLayer):
        pass

    layer, marked = KimiDeltaAttention(), KimiLayer()
    runner = V2Runner({"upstream": layer, "marked": marked})
    runner.initialize_kv_cache(4)
    context = runner.compilation_config.static_forward_context

    with written.names["initialize_upstream"](context, 4) as handle:
        assert handle.layers == ("upstream", "marked")
        state = layer.kv_cache[1]
        rows, has_state = torch.tensor([2]), torch.tensor([False])
        output = written.names["copy_states"](layer, state, rows, has_state, lambda initial: ("output", initial + 5))
        assert output == "output"
        assert state[2].eq(5).all()
    with written.names["initialize_with_padding"](context, 4) as handle:
        assert handle.layers == ("marked",)
        marked._ascend_kda_state_copy.scatter(marked.kv_cache[1], torch.ones(1, 2, 8, 8), torch.tensor([0]))
        assert not marked.kv_cache[1][0].any()
    with written.names["initialize_with_fallback"](context, 4) as handle:
        assert handle.client is not None
        assert handle.client.counters()["outages"] == 0
