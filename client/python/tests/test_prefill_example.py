"""The example: its maths, and that the daemon's copies give what plain indexing gives, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from daemon_process import Daemon, binary

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# A small model, so that a run is short.
SMALL = ("--sequences", "5", "--tokens", "150", "--heads", "2", "--width", "16", "--budget", "128", "--batch", "3")


def prefill(*arguments: str, address: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("STATECOPY_ADDR", "STATECOPYD")}
    if address is not None:
        environment["STATECOPY_ADDR"] = address
    return subprocess.run(
        [sys.executable, EXAMPLES / "prefill.py", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )


def report(*arguments: str, address: str | None = None) -> dict[str, Any]:
    done = prefill(*SMALL, *arguments, "--json", address=address)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_states_that_the_daemon_carries_equal_those_of_plain_indexing_bit_for_bit(shared_daemon: Daemon) -> None:
    ours = report(address=shared_daemon.address)
    assert ours["path"] == "daemon"
    assert ours["equal_to_plain"] is True
    assert max(ours["lengths"]) > 64, "no sequence is longer than a chunk"
    assert ours["difference_from_unchunked"] < 1e-5
    assert ours["difference_from_recurrent"] < 1e-5
    plain = report("--plain")
    assert plain["path"] == "plain"
    assert (ours["outputs_sha256"], ours["cache_sha256"]) == (plain["outputs_sha256"], plain["cache_sha256"])


def test_steps_that_end_on_chunks_equal_the_unchunked_run_bit_for_bit(shared_daemon: Daemon) -> None:
    ours = report("--aligned", address=shared_daemon.address)
    assert ours["steps"] > 3
    assert ours["difference_from_unchunked"] == 0


def test_it_starts_and_ends_a_daemon_of_its_own() -> None:
    done = prefill(*SMALL, "--daemon", str(binary()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit: yes" in done.stdout
    assert done.stdout.splitlines()[-1] == "all equal"
    assert not done.stderr


def test_wrong_usage_is_told_from_a_difference() -> None:
    for arguments, message in (
        (("--daemon", "/nowhere/statecopyd"), "is no program"),
        (("--tokens", "0"), "no whole number of at least 1"),
        (("--aligned", "--budget", "63"), "at least 64"),
    ):
        done = prefill(*arguments)
        assert done.returncode == 2
        assert message in done.stderr
    assert "STATECOPY_ADDR" in prefill("--help").stdout


@pytest.fixture
def delta_rule(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import delta_rule

    return delta_rule


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_chunks_and_single_tokens_agree_with_exact_arithmetic(delta_rule: Any, count: int) -> None:
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
