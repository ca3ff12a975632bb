"""The benchmark from Python runs, checks every path's bytes, and writes a record as `statecopy bench` does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parents[3] / "tests" / "peers"
PATHS = {
    "gather": {"daemon", "control", "daemon_preallocated", "torch_index", "index_select", "index_select_preallocated"},
    "clear": {"daemon", "control", "daemon_preallocated", "torch_index", "index_select", "index_select_preallocated"},
    "scatter": {"daemon", "control", "daemon_copied", "torch_index", "index_select"},
}


def bench(*arguments: str | Path, program: str = "bench.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PEERS / program, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, env=dict(os.environ))


def test_every_path_of_every_case_is_checked_and_measured(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ran = bench("--output", record, "--trials", "3", "--cases", "24576", "--seed", "7")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(record.read_text(encoding="utf-8"))
    assert (found["seed"], found["trials"], found["format"]) == (7, 3, 1)
    assert [case["name"] for case in found["cases"]] == [f"24576/s1/{operation}" for operation in PATHS]
    for operation, paths in PATHS.items():
        samples, medians = found["samples_us"][f"24576/s1/{operation}"], found["medians_us"][f"24576/s1/{operation}"]
        assert set(samples["wall"]) == set(medians["wall"]) == paths
        assert set(samples["host_enqueue"]) <= paths
        assert all(len(taken) == 3 and min(taken) > 0 for mode in samples.values() for taken in mode.values())
    assert set(found["paths"]) >= set.union(*PATHS.values())
    assert len(found["source"]["daemon_sha256"]) == 64
    assert "24576/s1/gather" in ran.stdout


def test_an_existing_output_is_an_error_and_stays(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text("kept", encoding="utf-8")
    ran = bench("--output", record)
    assert ran.returncode == 2
    assert "exists" in ran.stderr
    assert record.read_text(encoding="utf-8") == "kept"


def test_a_case_that_is_none_is_named(tmp_path: Path) -> None:
    ran = bench("--output", tmp_path / "record.json", "--cases", "s9")
    assert ran.returncode == 2
    assert "'s9'" in ran.stderr


def test_copies_are_measured_alone_and_beside_a_worker_that_registers(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ran = bench("--output", record, "--seconds", "0.4", program="beside.py")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(record.read_text(encoding="utf-8"))["beside"]
    assert list(found) == ["alone", "loaded", "new_kernels"]
    for company, told in found.items():
        tail = [told["copies"][name] for name in ("median_us", "p99_us", "p99_9_us", "longest_us")]
        assert told["copies"]["calls"] > 0
        assert tail[0] > 0
        assert tail == sorted(tail)
        assert company == "alone" or told["neighbour"]["rounds"] > 0
    kept = record.read_bytes()
    again = bench("--output", record, program="beside.py")
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert record.read_bytes() == kept
