"""The real daemon, in a runtime directory of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

# How long a test waits for anything: ten times what a loaded machine of two cores needs.
PATIENCE_S = 20.0
STEP_S = 0.005

Answer = TypeVar("Answer")


def eventually(what: str, ask: Callable[[], Answer]) -> Answer:
    """Asks again until the answer is true; fails when there is none in time."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(STEP_S)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Does work in so many threads at once, each with its number; fails when one does not end."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


def binary() -> Path:
    """The daemon's binary, as the variable STATECOPYD names it."""
    named = os.environ.get("STATECOPYD")
    assert named, (
        "STATECOPYD is not set: these tests start the real daemon. Build it with 'cargo build -p statecopyd', then "
        "set STATECOPYD=target/debug/statecopyd"
    )
    path = Path(named).resolve()
    assert os.access(path, os.X_OK), (
        f"STATECOPYD names {path}, which is no program: build it with 'cargo build -p statecopyd'"
    )
    return path


def runs(pid: int) -> bool:
    """Whether a process runs: it exists and is no zombie."""
    return _state_and_parent(pid)[0] not in ("", "Z")


def stop(pid: int) -> None:
    """Stops a process, and waits until every thread of it stands still."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")

    def still() -> bool:
        return all(_state_and_parent_in(task / "stat")[0] == "T" for task in tasks.iterdir())

    eventually("every thread stands still", still)


class Daemon:
    """`statecopyd serve`, ready from the start.

    Further arguments are the command's own (`--device`, `--spin-us`), and ``variables`` are added to its environment.
    """

    def __init__(self, *arguments: str, variables: Mapping[str, str] | None = None) -> None:
        # A short path: a socket's has at most 107 bytes.
        self._home = Path(tempfile.mkdtemp(prefix="sc-"))
        self.runtime = self._home / "run"
        self._log = self._home / "log"
        self._arguments = arguments
        self._variables = dict(variables or {})
        self._device_processes: list[int] = []
        self._killed = False
        self._start()

    @property
    def address(self) -> str:
        """What `statecopy.connect` takes."""
        return f"unix://{self.runtime / 'statecopyd.sock'}"

    @property
    def pid(self) -> int:
        """The supervisor."""
        return self._process.pid

    @property
    def device_process(self) -> int:
        """The device process of a daemon that serves one device."""
        children = _children(self.pid)
        assert len(children) == 1, f"the supervisor's children are {children}"
        return children[0]

    def device_process_or_none(self) -> int | None:
        """The same, while it may be away."""
        children = _children(self.pid)
        return children[0] if len(children) == 1 else None

    @property
    def running(self) -> bool:
        """Whether the supervisor runs."""
        return self._process.poll() is None

    def log(self) -> str:
        """What both processes wrote so far, of every start."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def ready(self) -> bool:
        """Whether it would serve a request now."""
        try:
            with urllib.request.urlopen(f"http://{self._http_address}/readyz", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def metric(self, name: str) -> float:
        """The value of a metric, added up over its labels."""
        with urllib.request.urlopen(f"http://{self._http_address}/metrics", timeout=5) as reply:
            text = reply.read().decode()
        values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}:\n{text}"
        return sum(map(float, values))

    def kill(self) -> None:
        """Kills the supervisor, and waits until its device process is gone too."""
        self._device_processes += _children(self.pid)
        self._killed = True
        self._process.kill()
        self._process.wait()
        eventually("the device process ends with its supervisor", lambda: not any(map(runs, self._device_processes)))

    def stop(self) -> None:
        """Ends it orderly; it must leave nothing behind."""
        if not self.running:
            return
        self._device_processes += _children(self.pid)
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(timeout=PATIENCE_S)
        assert code == 0, f"the daemon ended with {code}:\n{self.log()}"
        left = sorted(entry.name for entry in self.runtime.iterdir())
        assert not left, f"the daemon left {left} in its runtime directory"
        living = list(filter(runs, self._device_processes))
        assert not living, f"the daemon left the processes {living}"

    def restart(self) -> None:
        """Starts the next daemon in the same runtime directory; one that still runs is killed first."""
        if self.running:
            self.kill()
        self._start()

    def end(self) -> None:
        """Ends it however it stands, and removes its directory."""
        try:
            if self.running:
                self.stop()
            else:
                assert self._killed or self._process.returncode == 0, (
                    f"the daemon ended by itself with {self._process.returncode}:\n{self.log()}"
                )
        finally:
            if self.running:
                self._process.kill()
                self._process.wait()
            shutil.rmtree(self._home, ignore_errors=True)

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STATECOPY_")}
        environment |= {"XDG_CACHE_HOME": str(self._home / "cache"), **self._variables}
        self._killed = False
        with self._log.open("ab") as log:
            begin = log.tell()
            self._process = subprocess.Popen(
                [
                    *(binary(), "serve", "--runtime-dir", self.runtime, "--http-address", "127.0.0.1:0"),
                    *self._arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        try:
            self._http_address = eventually("the daemon says where it serves", lambda: self._announced(begin))
            eventually("the daemon is ready", self.ready)
        except BaseException:
            self._process.kill()
            self._process.wait()
            print(f"--- the daemon's log\n{self.log()}")
            raise

    def _announced(self, begin: int) -> str:
        text = self._log.read_bytes()[begin:].decode(errors="replace")
        assert self.running, f"the daemon ended with {self._process.returncode}:\n{text}"
        found = re.search(r'serving .*http="([^"]+)"', text)
        return found.group(1) if found else ""


def _children(pid: int) -> list[int]:
    living = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [child for child in living if _state_and_parent(child)[1] == pid]


def _state_and_parent(pid: int) -> tuple[str, int]:
    return _state_and_parent_in(Path(f"/proc/{pid}/stat"))


def _state_and_parent_in(stat: Path) -> tuple[str, int]:
    try:
        text = stat.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    # They stand behind the name, which is in parentheses.
    state, parent = text.rpartition(") ")[2].split()[:2]
    return state, int(parent)
