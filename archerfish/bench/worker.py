"""One engine in a process of its own: ours, another version of ours, or a peer.

The process reads a line of JSON for every call of a method and answers with one line. A fresh process makes imports and
loading measurable and keeps the thread pools of engines apart. It loads this file and `engines.py` by their paths, so that
the `archerfish` it imports may be that of another checkout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ENGINES_FILE = Path(__file__).with_name("engines.py")
PACKAGE_PATH = str(Path(__file__).parents[2])
TIMEOUT_S = 1800.0
STOP_S = 5.0


class WorkerError(Exception):
    """An engine raised an error, crashed or did not answer; the other engines go on without it."""


class Worker:
    """The process of one engine, seen from the bench."""

    def __init__(
        self, engine: str, arguments: Mapping[str, Any], *, path: str = "", environment: Mapping[str, str] | None = None,
        file: Path = ENGINES_FILE, timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        """engine: the name of a class in `file`; path: what the process imports first, in place of this checkout."""
        self.engine, self._timeout_s = engine, timeout_s
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (close() closes it)
        paths = [path, PACKAGE_PATH, os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-P", __file__, str(file), engine, json.dumps(dict(arguments))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8", env=variables
        )

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the engine and wait for its result."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            requests.flush()
        except OSError:
            raise WorkerError(self._reason_of_end()) from None
        # An answer is one line and comes only after a request, so Python's own buffer is empty here.
        if not select.select([answers], [], [], self._timeout_s)[0]:
            raise WorkerError(f"no answer to {method!r} in {self._timeout_s:.0f} s")
        line = answers.readline()
        if not line:
            raise WorkerError(self._reason_of_end())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End the process: close its input, and kill it if that does not help."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _reason_of_end(self) -> str:
        """The exit code and the last line that the process wrote."""
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"the process ended with {code}" + (f": {lines[-1][:300]}" if lines else "")


def answer(engine: Any, line: str) -> dict[str, Any]:
    """The answer to one request. An error of the engine becomes {"error": ...} with the place that raised it."""
    request = json.loads(line)
    try:
        return {"result": getattr(engine, request["method"])(**request["arguments"])}
    except Exception as error:  # a peer may raise anything
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {str(error).strip()[:500]} ({Path(last.filename).name}:{last.lineno})"}


def main() -> None:
    file, name, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not disturb the answers
    spec = importlib.util.spec_from_file_location("archerfish_bench_engines", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    engine = getattr(module, name)(**arguments)
    for line in sys.stdin:
        answers.write(json.dumps(answer(engine, line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
