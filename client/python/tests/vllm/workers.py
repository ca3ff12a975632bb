"""Stand-ins in the shape of vLLM's runners and of the layers that they bind: what the glue sees of a worker.

They do what the originals do as far as state copies are concerned, in the same order, and write down what happened.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import statecopy.torch

HEADS, WIDTH = 2, 8
PAYLOAD = HEADS * WIDTH * WIDTH
# Elements of the convolution's state in a page, before the recurrent one.
CONVOLUTION = 48


class KimiLayer:
    """In the shape of vllm-ascend's Kimi K3 layer: its prefill copies states as that one's does."""

    _requires_kda_state_copy = True
    _ascend_kda_state_copy: Any = None
    _kda_state_copy_ready = False

    def __init__(self) -> None:
        self.kv_cache: Any = (torch.tensor([]), torch.tensor([]))

    def _run_prefill(
        self, added: torch.Tensor, recurrent_state: Any, state_indices: torch.Tensor, has_initial_state: Any
    ) -> torch.Tensor:
        """Stands for the chunk maths with a sum: what is returned is the initial state, and `added` comes on top."""
        if self._ascend_kda_state_copy is None or not self._kda_state_copy_ready:
            raise RuntimeError("the KDA state copy is not initialised")
        initial_state: torch.Tensor = self._ascend_kda_state_copy.gather(
            recurrent_state, state_indices, has_initial_state
        )
        final_state = initial_state.float() + added
        self._ascend_kda_state_copy.scatter(recurrent_state, final_state, state_indices)
        return initial_state

    def forward(self, added: torch.Tensor, state_indices: torch.Tensor, has_initial_state: Any) -> torch.Tensor:
        bound = self.kv_cache[0] if isinstance(self.kv_cache, list) and self.kv_cache else self.kv_cache
        return self._run_prefill(added, bound[1] if bound else None, state_indices, has_initial_state)


class UpstreamLayer(KimiLayer):
    """A layer of upstream vLLM: no marker, and it may have more caches."""

    _requires_kda_state_copy = False


class AttentionLayer:
    """Any other layer."""

    def __init__(self) -> None:
        self.kv_cache = torch.tensor([])


def pages(rows: int, layers: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Shareable memory of a KV-cache group: one page a row, with the caches of all its layers and a gap."""
    return statecopy.torch.empty((rows, layers * (CONVOLUTION + PAYLOAD) + 16), dtype)


def caches(memory: torch.Tensor, at: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution's state and the recurrent state of a layer, as strided views of the pages."""
    begin = at * (CONVOLUTION + PAYLOAD)
    convolution = memory[:, begin : begin + CONVOLUTION].unflatten(1, (12, 4))
    state = memory[:, begin + CONVOLUTION : begin + CONVOLUTION + PAYLOAD].unflatten(1, (HEADS, WIDTH, WIDTH))
    return convolution, state


class Runner:
    """What both runners have in common: the layers in the forward context, and a model that runs them."""

    def __init__(self, layers: dict[str, Any], *, max_num_seqs: int = 4) -> None:
        self.compilation_config = SimpleNamespace(static_forward_context=layers)
        self.scheduler_config = SimpleNamespace(max_num_seqs=max_num_seqs)
        self.vllm_config = SimpleNamespace(
            compilation_config=self.compilation_config, scheduler_config=self.scheduler_config
        )
        self.happened: list[str] = []

    @property
    def kda_layers(self) -> list[KimiLayer]:
        layers = self.compilation_config.static_forward_context.values()
        return [layer for layer in layers if isinstance(layer, KimiLayer)]

    def warm_up(self) -> None:
        """A dummy run: padding alone."""
        self.happened.append("warm-up")
        self._forward(torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bool))

    def capture(self) -> None:
        """The run whose kernels a graph records."""
        self.happened.append("capture")
        self._forward(torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bool))

    def execute(self, rows: list[int], has_initial_state: list[bool]) -> list[torch.Tensor]:
        """One prefill step, which adds 1 to every state: the initial states by layer."""
        self.happened.append("request")
        return self._forward(torch.tensor(rows, dtype=torch.int32), torch.tensor(has_initial_state))

    def _forward(self, rows: torch.Tensor, has_initial_state: torch.Tensor) -> list[torch.Tensor]:
        added = torch.ones(len(rows), HEADS, WIDTH, WIDTH)
        return [layer.forward(added, rows, has_initial_state) for layer in self.kda_layers]

    def _bind(self, rows: int) -> None:
        self.happened.append("bind")
        self.rows = rows
        memory = pages(rows, len(self.kda_layers) or 1)
        for at, layer in enumerate(self.kda_layers):
            layer.kv_cache = self._as_bound(caches(memory, at))

    def _as_bound(self, caches: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return caches


class V1Runner(Runner):
    """In the shape of `vllm/v1/worker/gpu_model_runner.py`."""

    def profile_cudagraph_memory(self) -> None:
        """Captures over a small cache that is thrown away."""
        self.initialize_kv_cache(2, is_profiling=True)
        self.capture()
        self._cleanup_profiling_kv_cache()

    def initialize_kv_cache(self, kv_cache_config: int, is_profiling: bool = False) -> None:
        self._bind(kv_cache_config)

    def _cleanup_profiling_kv_cache(self) -> None:
        self.happened.append("throw away")
        for layer in self.kda_layers:
            layer.kv_cache = []

    def _as_bound(self, caches: tuple[torch.Tensor, torch.Tensor]) -> Any:
        # As older versions do it, a list by virtual engine; newer ones bind the tuple itself.
        return [caches]

    def capture_model(self) -> None:
        self.capture()


class V2Runner(Runner):
    """In the shape of `vllm/v1/worker/gpu/model_runner.py`."""

    def initialize_kv_cache(self, kv_cache_config: int) -> None:
        self._bind(kv_cache_config)

    def capture_model(self) -> int:
        self.capture()
        return 0


class Worker:
    """In the shape of `vllm/v1/worker/gpu_worker.py`."""

    def __init__(self, runner: Any) -> None:
        self.model_runner = runner

    def initialize_from_config(self, kv_cache_config: int) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> None:
        self.model_runner.warm_up()
        self.model_runner.capture_model()

    def execute_model(self, rows: list[int], has_initial_state: list[bool]) -> list[torch.Tensor]:
        states: list[torch.Tensor] = self.model_runner.execute(rows, has_initial_state)
        return states

    def sleep(self, level: int = 1) -> None:
        """Discards the cache, as sleep does on every level."""
        self.model_runner.happened.append("sleep")
        for layer in self.model_runner.kda_layers:
            layer.kv_cache = ()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Maps memory under the cache again, with nothing in it."""
        self.model_runner.happened.append("wake")
        if tags is None or "kv_cache" in tags:
            self.model_runner._bind(self.model_runner.rows)
