#!/usr/bin/env python3
"""Chunked prefill of KDA layers on the CPU, with the states of all sequences carried by the daemon.

A few sequences of random length are prefilled as a continuous-batching server would do it: in steps of a bounded
number of tokens, several sequences a step, each cut wherever the budget ends. Between its steps a sequence's state
lies in a row of the layer's cache. Each step gathers the states that it continues, runs the chunk maths
(delta_rule.py), and scatters the states that it ends with. A row that a finished sequence leaves is given to the next
one, which must begin with zeros: that is what the flags say. Rows of the batch that no sequence uses are padded with
row 0, the null block.

It ends with what was compared:

  unchunked   every sequence at once, with no cache and no daemon: equal but for rounding, because a sequence that is
  cut
              inside of a chunk of 64 tokens is summed up in another order. With --aligned steps end on chunks: equal
              bit for bit.
  recurrent   the shortest sequence, token by token, by the definition of the delta rule: equal but for rounding.
  plain       the same steps with plain torch indexing and masking in place of the daemon: outputs and caches equal, bit
              for bit.

The daemon is the one that STATECOPY_ADDR names. Without that variable one is started, and ended: --daemon names the
program, or STATECOPYD, or it is found on PATH. Exit codes: 0 all equal; 1 something is not; 2 usage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from delta_rule import CHUNK, Tokens, chunked, recurrent
from torch.nn.functional import normalize, softplus

# What the cache holds before anybody wrote to it: a state that is gathered by mistake is seen.
LEFT_BY_OTHERS = 7.0
# Float32 sums of some hundred products of numbers below 1.
TOLERANCE = 1e-5


class StateCopies(Protocol):
    """What a layer calls."""

    def gather(self, state: torch.Tensor, indices: torch.Tensor, flags: torch.Tensor) -> torch.Tensor: ...

    def scatter(self, state: torch.Tensor, packed: torch.Tensor, indices: torch.Tensor) -> None: ...


class PlainCopies:
    """The same by torch indexing and masking, in this process. Row 0 is padding."""

    def gather(self, state: torch.Tensor, indices: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        keep = (indices > 0) & (indices < state.shape[0]) & flags
        return state[indices.clamp(0, state.shape[0] - 1)].masked_fill(~keep[:, None, None, None], 0.0)

    def scatter(self, state: torch.Tensor, packed: torch.Tensor, indices: torch.Tensor) -> None:
        valid = (indices > 0) & (indices < state.shape[0])
        state[indices[valid]] = packed[valid]


class Share(NamedTuple):
    """What one step does of one sequence."""

    sequence: int
    start: int
    stop: int
    row: int


class KdaLayer:
    """A layer in the shape of vllm-ascend's for Kimi K3, without projections and convolution."""

    _requires_kda_state_copy = True

    def __init__(self) -> None:
        self.kv_cache: tuple[torch.Tensor, ...] = ()
        self._ascend_kda_state_copy: StateCopies | None = None
        self._kda_state_copy_ready = False

    def run_prefill(self, parts: list[Tokens], rows: torch.Tensor, has_state: torch.Tensor) -> list[torch.Tensor]:
        """Runs the tokens of each sequence of a step, from the state in its row to the state in its row."""
        copies = self._ascend_kda_state_copy
        if copies is None or not self._kda_state_copy_ready:
            raise RuntimeError("the state copy is not initialised")
        state = self.kv_cache[1]
        packed = copies.gather(state, rows, has_state)
        final = torch.zeros_like(packed)
        outputs = []
        for at, part in enumerate(parts):
            output, final[at] = chunked(part, packed[at])
            outputs.append(output)
        copies.scatter(state, final, rows)
        return outputs


@dataclass
class Workload:
    """Sequences, and the steps that prefill them. Made from a seed: the same on every run."""

    tokens: list[list[Tokens]]
    """By layer and sequence."""
    steps: list[list[Share]]
    rows: int
    batch: int
    heads: int
    width: int
    device: torch.device

    @classmethod
    def draw(cls, options: argparse.Namespace) -> Workload:
        generator = torch.Generator().manual_seed(options.seed)
        lengths = torch.randint(1, options.tokens + 1, (options.sequences,), generator=generator).tolist()
        device = torch.device(options.device)
        tokens = [
            [_tokens(length, options.heads, options.width, generator, device) for length in lengths]
            for _ in range(options.layers)
        ]
        unit = CHUNK if options.aligned else 1
        steps = _schedule(lengths, options.batch, options.budget, unit, generator)
        # Row 0 is the null block.
        return cls(tokens, steps, 1 + options.batch, options.batch, options.heads, options.width, device)

    @property
    def lengths(self) -> list[int]:
        return [sequence.length for sequence in self.tokens[0]]

    def layers(self, storage: torch.Tensor) -> dict[str, KdaLayer]:
        """Layers with caches in `storage`, as a runner binds them: a page is one row of all layers, and more."""
        layers = {}
        payload = self.heads * self.width * self.width
        for at in range(len(self.tokens)):
            layer = KdaLayer()
            convolution = storage[:, -1:]
            state = storage[:, at * payload : (at + 1) * payload].unflatten(1, (self.heads, self.width, self.width))
            layer.kv_cache = (convolution, state)
            layers[f"model.layers.{at}.self_attn"] = layer
        return layers

    @property
    def page(self) -> int:
        """Elements of a page: what the layers need, and a quarter for others."""
        payload = self.heads * self.width * self.width
        return len(self.tokens) * payload + payload // 4


def _tokens(count: int, heads: int, width: int, generator: torch.Generator, device: torch.device) -> Tokens:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query, key = (normalize(normal(heads, count, width), dim=-1) for _ in range(2))
    value, gate, beta = normal(heads, count, width), normal(heads, count, width), normal(heads, count)
    # A decay for each channel: from those that forget in some tokens to those that keep for thousands.
    strength = torch.logspace(-3, 0, width)
    made = Tokens(query, key, value, -strength * softplus(gate), beta.sigmoid())
    return Tokens(*(tensor.to(device) for tensor in made))


def _schedule(lengths: list[int], batch: int, budget: int, unit: int, generator: torch.Generator) -> list[list[Share]]:
    """Steps of at most `budget` tokens and `batch` sequences; a share that ends no sequence is a multiple of `unit`."""
    waiting, free = list(range(len(lengths))), list(range(1, batch + 1))
    running: dict[int, tuple[int, int]] = {}
    steps = []
    while waiting or running:
        while waiting and free:
            running[waiting.pop(0)] = (0, free.pop(0))
        step, left = [], budget
        for sequence, (start, row) in list(running.items()):
            remaining = lengths[sequence] - start
            share = int(torch.randint(1, remaining + 1, (), generator=generator))
            share = min(-(-share // unit) * unit, remaining)
            if share > left:
                share = left // unit * unit
            if not share:
                continue
            step.append(Share(sequence, start, start + share, row))
            left -= share
            running[sequence] = (start + share, row)
            if start + share == lengths[sequence]:
                del running[sequence]
                free.append(row)
        steps.append(step)
    return steps


def run(workload: Workload, layers: dict[str, KdaLayer], check: Callable[[], None]) -> list[list[torch.Tensor]]:
    """Prefills everything in steps. The outputs [H, T, V] by layer and sequence. ``check`` is called after each step."""
    outputs: list[list[list[torch.Tensor]]] = [[[] for _ in workload.lengths] for _ in layers]
    for step in workload.steps:
        # A batch of fixed width, as a captured graph has it: what is left of it is padding.
        rows = torch.zeros(workload.batch, dtype=torch.int32)
        has_state = torch.zeros(workload.batch, dtype=torch.bool)
        for at, share in enumerate(step):
            rows[at], has_state[at] = share.row, share.start > 0
        rows, has_state = rows.to(workload.device), has_state.to(workload.device)
        for of_layer, layer, tokens in zip(outputs, layers.values(), workload.tokens, strict=True):
            parts = [tokens[share.sequence].part(share.start, share.stop) for share in step]
            for share, output in zip(step, layer.run_prefill(parts, rows, has_state), strict=True):
                of_layer[share.sequence].append(output)
        check()
    return [[torch.cat(parts, dim=1) for parts in of_layer] for of_layer in outputs]


def through_plain(workload: Workload) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """Outputs and cache of a run without a daemon."""
    storage = torch.full((workload.rows, workload.page), LEFT_BY_OTHERS, device=workload.device)
    layers = workload.layers(storage)
    for layer in layers.values():
        layer._ascend_kda_state_copy, layer._kda_state_copy_ready = PlainCopies(), True
    return run(workload, layers, lambda: None), storage


def through_daemon(workload: Workload, address: str | None) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """Outputs and cache of a run whose states the daemon copies."""
    import statecopy.torch
    from statecopy.vllm import initialize_state_copy

    shape = (workload.rows, workload.page)
    if workload.device.type == "cpu":
        storage = statecopy.torch.empty(shape, torch.float32)
    else:
        storage = torch.empty(shape, device=workload.device)
    storage.fill_(LEFT_BY_OTHERS)
    layers = workload.layers(storage)
    with initialize_state_copy(layers, workload.batch, address=address, null_row="skip") as state_copy:
        return run(workload, layers, state_copy.check), storage.clone()


@contextmanager
def daemon(program: str, device: torch.device) -> Iterator[str]:
    """A daemon of this run alone: its address."""
    served = "host"
    if device.type == "cuda":
        # By UUID: an ordinal means another GPU where CUDA_VISIBLE_DEVICES differs.
        served = f"cuda:GPU-{torch.cuda.get_device_properties(device).uuid}"
    with tempfile.TemporaryDirectory(prefix="sc-") as runtime:
        command = [program, "serve", "--runtime-dir", runtime, "--http-address", "off", "--device", served]
        process = subprocess.Popen([*command, "--log-level", "warn"], stdin=subprocess.DEVNULL)
        try:
            yield f"unix://{runtime}/statecopyd.sock"
        finally:
            process.terminate()
            process.wait()


def _program(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    named = options.daemon or os.environ.get("STATECOPYD") or shutil.which("statecopyd")
    if not named:
        parser.error("STATECOPY_ADDR is not set and no statecopyd is found: pass --daemon PATH, or --plain for none")
    if not os.access(named, os.X_OK):
        parser.error(f"--daemon: {named} is no program")
    return str(named)


def _digest(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))


def compare(workload: Workload, outputs: list[list[torch.Tensor]]) -> dict[str, float]:
    """How far outputs are from those of the unchunked run, and, for the shortest sequence, of the recurrent one."""
    zeros = torch.zeros(workload.heads, workload.width, workload.width, device=workload.device)
    shortest = min(range(len(workload.lengths)), key=workload.lengths.__getitem__)
    unchunked = recurrently = 0.0
    for tokens, ours in zip(workload.tokens, outputs, strict=True):
        unchunked = max(unchunked, _difference(ours, [chunked(sequence, zeros)[0] for sequence in tokens]))
        by_token = recurrent(tokens[shortest], zeros)[0]
        recurrently = max(recurrently, _difference([ours[shortest]], [by_token]))
    return {"unchunked": unchunked, "recurrent": recurrently}


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def count(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=_positive, metavar="COUNT", default=default, help=f"{text} (default {default})")

    parser.add_argument("--plain", action="store_true", help="run with plain torch indexing alone, without a daemon")
    parser.add_argument("--aligned", action="store_true", help=f"end steps on chunks of {CHUNK} tokens")
    parser.add_argument("--device", default="cpu", help="where states and maths are: cpu or cuda (default cpu)")
    parser.add_argument("--daemon", metavar="PATH", help="the program to start where STATECOPY_ADDR is not set")
    count("--sequences", 7, "how many are prefilled")
    count("--tokens", 300, "of the longest that there may be")
    count("--layers", 2, "KDA layers")
    count("--heads", 4, "heads of a layer; Kimi K3 at TP8 has 12")
    count("--width", 32, "K and V of a head; Kimi K3 has 128")
    count("--batch", 4, "sequences of one step at most")
    count("--budget", 192, "tokens of one step at most")
    parser.add_argument("--seed", type=int, default=0, help="draws other numbers (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    options = parser.parse_args(arguments)
    if options.aligned and options.budget < CHUNK:
        parser.error(f"--budget is {options.budget}; with --aligned it is at least {CHUNK}, one chunk")
    return options, parser


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def main(arguments: list[str] | None = None) -> int:
    options, parser = parse(arguments)
    starts_daemon = not options.plain and not os.environ.get("STATECOPY_ADDR")
    program = _program(options, parser) if starts_daemon else None
    workload = Workload.draw(options)
    outputs, cache = through_plain(workload)
    equal_to_plain = None
    if not options.plain:
        plain = [tensor for of_layer in outputs for tensor in of_layer], cache
        with ExitStack() as stack:
            address = None if program is None else stack.enter_context(daemon(program, workload.device))
            outputs, cache = through_daemon(workload, address)
        ours = [tensor for of_layer in outputs for tensor in of_layer], cache
        equal_to_plain = _digest([*plain[0], plain[1]]) == _digest([*ours[0], ours[1]])
    differences = compare(workload, outputs)
    most = {"unchunked": 0.0 if options.aligned else TOLERANCE, "recurrent": TOLERANCE}
    equal = equal_to_plain is not False and all(differences[name] <= most[name] for name in most)
    report = {
        "path": "plain" if options.plain else "daemon",
        "device": str(workload.device),
        "lengths": workload.lengths,
        "steps": len(workload.steps),
        "carried": sum(share.start > 0 for step in workload.steps for share in step) * len(workload.tokens),
        "copies": 2 * len(workload.steps) * len(workload.tokens),
        "outputs_sha256": _digest([tensor for of_layer in outputs for tensor in of_layer]),
        "cache_sha256": _digest([cache]),
        "difference_from_unchunked": differences["unchunked"],
        "difference_from_recurrent": differences["recurrent"],
        "equal_to_plain": equal_to_plain,
        "equal": equal,
    }
    print(json.dumps(report) if options.json else _table(report, most))
    return 0 if equal else 1


def _table(report: Mapping[str, object], most: dict[str, float]) -> str:
    lines = [f"sequences of {report['lengths']} tokens in {report['steps']} steps on {report['device']}"]
    lines.append(
        f"{report['copies']} copies through {report['path']}; {report['carried']} states carried to a later step"
    )
    for name, allowed in most.items():
        found = report[f"difference_from_{name}"]
        lines.append(f"differs from {name:9} by {found:.1e} at most; allowed is {allowed:.0e}")
    if report["equal_to_plain"] is not None:
        lines.append(
            f"outputs and caches equal those of plain, bit for bit: {'yes' if report['equal_to_plain'] else 'NO'}"
        )
    lines.append(f"outputs {str(report['outputs_sha256'])[:16]}, caches {str(report['cache_sha256'])[:16]}")
    lines.append("all equal" if report["equal"] else "NOT EQUAL")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
