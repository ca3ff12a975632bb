"""One prefill step's copies of every layer: one batched gather before and one batched scatter after, or a kernel a layer and direction."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from paths import triton_rival

NAME = "step69"
LAYERS = 69
SELECTED = 8
ROWS = 64
PAYLOAD = (12, 128, 128)
# Layers side by side in a page.
LAYERS_A_PAGE = 27
MEANINGS = {
    "ordered": "gather_all and scatter_all over the binding set in the order of the current stream, and torch.cuda.synchronize",
    "ordered_control": "ordered measured a second time under another label",
    "daemon": "the same, host-completed",
    "triton": "a gather of each layer, then a scatter of each, by compiled launchers; each output is allocated in the interval",
    "triton_preallocated": "the same into packed memory taken before the interval",
}


class Step:
    """Every layer's state, and the ways to have the rows of one step copied out and back."""

    def __init__(self, client: Any, ordered: Any, device: torch.device, order: random.Random) -> None:
        self.device, self.order = device, order
        heads, values, keys = PAYLOAD
        self.payload = heads * values * keys
        page = LAYERS_A_PAGE * self.payload
        self.states: list[torch.Tensor] = []
        for first in range(0, LAYERS, LAYERS_A_PAGE):
            memory = torch.randint(-100, 100, (ROWS * page,), device=device, dtype=torch.int32).view(torch.float32)
            for layer in range(min(LAYERS_A_PAGE, LAYERS - first)):
                strides = (page, values * keys, keys, 1)
                self.states.append(memory.as_strided((ROWS, *PAYLOAD), strides, layer * self.payload))
        named = {f"layers.{at}": state for at, state in enumerate(self.states)}
        register = {"max_selected": SELECTED, "sets": {"all": list(named)}, "layers": False}
        self.host = client.register(named, **register).sets["all"]
        self.ordered = ordered.register(named, **register).sets["all"]
        self.client = ordered
        self.rival = triton_rival()
        self.flags = torch.ones(SELECTED, device=device, dtype=torch.bool)
        self.packed = torch.empty((LAYERS, SELECTED, *PAYLOAD), device=device)
        grid = (-(-self.payload // self.rival.BLOCK), SELECTED, 1)
        self.tail = (ROWS, page, self.payload, True, self.rival.BLOCK)
        nothing = torch.full((SELECTED,), -1, dtype=torch.int32, device=device)
        # Compiled on rows that do not exist: nothing of the states changes.
        self.gather, self.scatter = (
            kernel[grid](*self._arguments(self.states[0], self.packed[0], nothing), num_warps=self.rival.WARPS)[grid]
            for kernel in (self.rival.gather, self.rival.scatter)
        )
        self.calls = {
            "ordered": lambda rows: self._batched(self.ordered, rows),
            "ordered_control": lambda rows: self._batched(self.ordered, rows),
            "daemon": lambda rows: self._batched(self.host, rows),
            "triton": lambda rows: self._by_layer(rows, None),
            "triton_preallocated": lambda rows: self._by_layer(rows, self.packed),
        }

    def _arguments(self, state: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor) -> tuple[Any, ...]:
        return state, packed, rows, self.flags.view(torch.uint8), *self.tail

    def _batched(self, plan: Any, rows: torch.Tensor) -> torch.Tensor:
        packed = plan.gather_all(rows, self.flags)
        plan.scatter_all(packed, rows)
        return packed

    def _by_layer(self, rows: torch.Tensor, into: torch.Tensor | None) -> Any:
        packed = into
        if packed is None:
            packed = [torch.empty((SELECTED, *PAYLOAD), device=self.device) for _ in self.states]
        for state, own in zip(self.states, packed, strict=True):
            self.gather(*self._arguments(state, own, rows))
        for state, own in zip(self.states, packed, strict=True):
            self.scatter(*self._arguments(state, own, rows))
        return packed

    def _rows(self) -> torch.Tensor:
        return torch.tensor(self.order.sample(range(ROWS), SELECTED), dtype=torch.int32, device=self.device)

    def check(self) -> None:
        """Every path gathers each layer's rows, and leaves the states as they were."""
        before = [state.clone() for state in self.states]
        for path, call in self.calls.items():
            rows = self._rows()
            packed = call(rows)
            torch.cuda.synchronize(self.device)
            for layer, (state, kept) in enumerate(zip(self.states, before, strict=True)):
                wanted = kept[rows.long()].view(torch.int32)
                if not torch.equal(packed[layer].view(torch.int32), wanted):
                    raise AssertionError(f"{NAME}: {path} gives wrong bytes of layer {layer}")
                if not torch.equal(state.view(torch.int32), kept.view(torch.int32)):
                    raise AssertionError(f"{NAME}: {path} leaves wrong bytes in layer {layer}")

    def measure(self, trials: int) -> dict[str, dict[str, list[float]]]:
        """Wall times in microseconds by path, in the order of the trials; every path's bytes are checked before."""
        self.check()
        paths = list(self.calls)
        samples: dict[str, list[float]] = {path: [] for path in paths}
        for _ in range(trials):
            self.order.shuffle(paths)
            for path in paths:
                other, rows = self._rows(), self._rows()
                self.calls[path](other)
                torch.cuda.synchronize(self.device)
                begin = time.perf_counter_ns()
                packed = self.calls[path](rows)
                torch.cuda.synchronize(self.device)
                samples[path].append((time.perf_counter_ns() - begin) / 1e3)
                del packed
        self.client.check()
        return {"wall": samples}
