"""The example: its maths, and that the daemon's copies give what plain indexing gives, bit for bit."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from daemon_process import Daemon, binary

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# A small model, so that a run is short.
SMALL = ("--sequences", "5", "--tokens", "150", "--heads", "2", "--width", "16", "--budget", "128", "--batch", "3")


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of examples is searched for modules."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def report(
    examples: None, shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """Runs the example in this process, beside a daemon that STATECOPY_ADDR names: what it says in JSON."""
    prefill = importlib.import_module("prefill")
    monkeypatch.setenv("STATECOPY_ADDR", shared_daemon.address)

    def run(*arguments: str) -> dict[str, Any]:
        code = prefill.main([*SMALL, *arguments, "--json"])
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert code == (0 if told["equal"] else 1)
        return told

    return run


def test_states_that_the_daemon_carries_equal_those_of_plain_indexing_bit_for_bit(
    report: Callable[..., dict[str, Any]],
) -> None:
    ours, plain = report(), report("--plain")
    assert (ours["path"], plain["path"]) == ("daemon", "plain")
    assert ours["equal"] is ours["equal_to_plain"] is True
    assert (ours["outputs_sha256"], ours["cache_sha256"]) == (plain["outputs_sha256"], plain["cache_sha256"])


def test_steps_of_any_length_agree_with_the_unchunked_run(report: Callable[..., dict[str, Any]]) -> None:
    ours = report()
    assert max(ours["lengths"]) > 64, "no sequence is longer than a chunk"
    assert ours["carried"] > 10
    assert 0 < ours["difference_from_unchunked"] < 1e-5
    assert ours["difference_from_recurrent"] < 1e-5


def test_steps_that_end_on_chunks_equal_the_unchunked_run_bit_for_bit(report: Callable[..., dict[str, Any]]) -> None:
    ours = report("--aligned", "--tokens", "200")
    assert ours["carried"] > 0
    assert ours["difference_from_unchunked"] == 0


def test_a_state_that_is_lost_on_the_way_is_a_difference(
    report: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = importlib.import_module("statecopy.vllm").LayerStateCopy
    monkeypatch.setattr(attached, "scatter", lambda *arguments: None)
    ours = report()
    assert ours["equal_to_plain"] is False
    assert ours["equal"] is False
    assert ours["difference_from_unchunked"] > 1e-3


def test_it_starts_and_ends_a_daemon_of_its_own() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STATECOPY")}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "prefill.py", *SMALL, "--daemon", binary()],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit: yes" in done.stdout
    assert done.stdout.splitlines()[-1] == "all equal"
    assert not done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--daemon", "/nowhere/statecopyd"], "is no program"),
        (["--tokens", "0"], "no whole number of at least 1"),
        (["--aligned", "--budget", "63"], "at least 64"),
    ],
)
def test_wrong_usage_is_told_from_a_difference(
    examples: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.delenv("STATECOPY_ADDR", raising=False)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("prefill").main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_chunks_and_single_tokens_agree_with_exact_arithmetic(examples: None, count: int) -> None:
    delta_rule = importlib.import_module("delta_rule")
    generator = torch.Generator().manual_seed(count)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query, key = (torch.nn.functional.normalize(normal(2, count, 16), dim=-1) for _ in range(2))
    # Strong decays: sums of gates far below where the exponent of one alone is zero.
    gate, beta = -20 * torch.rand(2, count, 16, generator=generator) ** 4, normal(2, count).sigmoid()
    tokens = delta_rule.Tokens(query, key, normal(2, count, 8), gate, beta)
    state = normal(2, 8, 16)
    exact = delta_rule.recurrent(delta_rule.Tokens(*(tensor.double() for tensor in tokens)), state.double())
    for path in (delta_rule.chunked, delta_rule.recurrent):
        for found, wanted in zip(path(tokens, state), exact, strict=True):
            assert found.shape == wanted.shape
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    kept = state.clone()
    delta_rule.chunked(tokens, state)
    assert torch.equal(state, kept)
