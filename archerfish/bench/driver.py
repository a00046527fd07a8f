"""The other end of a worker: starts it, asks it, notices when it dies."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from archerfish.bench.peers import PeerOptions

TIMEOUT_S = 900.0
STOP_S = 5.0


class PeerFailedError(Exception):
    """An engine raised, crashed or did not answer; the others go on without it."""


class WorkerProcess:
    """One engine in its own process."""

    def __init__(self, command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (close() closes it)
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8"
        )

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        try:
            pipe_in.write(json.dumps({"op": op, **request}) + "\n")
            pipe_in.flush()
        except OSError:
            raise PeerFailedError(self._last_words()) from None
        # Answers are one line each and never unasked for, so nothing can be waiting in Python's own buffer here.
        if not select.select([pipe_out], [], [], self._timeout_s)[0]:
            raise PeerFailedError(f"no answer to {op!r} in {self._timeout_s:.0f} s")
        line = pipe_out.readline()
        if not line:
            raise PeerFailedError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailedError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process: by closing its input, or by force if that does not help."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _last_words(self) -> str:
        """Why the process is gone: its exit code and the last line that it wrote."""
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"the process ended with {code}" + (f": {lines[-1][:300]}" if lines else "")


def worker_command(key: str, options: PeerOptions) -> list[str]:
    return [sys.executable, "-m", "archerfish.bench.worker", key, json.dumps(asdict(options))]
