"""`python -m archerfish.serve.engine_process`: the process around an EngineHost, a child of the main process (`processes`)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time

from archerfish.errors import ArcherfishError
from archerfish.serve.host import EngineHost
from archerfish.serve.host_config import HostConfig
from archerfish.serve.processes import open_report_pipe, read_config, send_report, watch_parent

LAST_S = 5.0  # the process may take this long to end after its parent
EXIT_HUNG = 75


def main() -> int:
    """Read the configuration, load the models, report the address, and serve."""
    pipe = open_report_pipe()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the cores belong to the compute thread
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    config = read_config(HostConfig)

    def end() -> None:
        host.stop(0)
        time.sleep(LAST_S)
        os._exit(1)

    def beat() -> None:
        with contextlib.suppress(OSError):  # the pipe is full of heartbeats, or the main process has ended
            os.write(pipe.fileno(), b"\n")

    try:
        host = EngineHost(config)
        watch_parent(end)
        host.load_models()
        address = host.open()
    except ArcherfishError as error:
        send_report(pipe, {"error": error.message, "hint": error.hint or ""})
        return error.exit_code
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    send_report(pipe, {"address": address})
    os.set_blocking(pipe.fileno(), False)
    host.on_beat = beat
    host.on_hang = lambda: os._exit(EXIT_HUNG)  # the main process starts another
    host.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
