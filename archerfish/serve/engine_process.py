"""`python -m archerfish.serve.engine_process`: the process around an EngineHost.

Its configuration is one line of JSON on standard input, whose end is also the end of the process, so that it never outlives who
started it. On standard output it says where it serves, or why it does not, and then that it lives (`vitals`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from typing import BinaryIO

import msgspec

from archerfish.errors import ArcherfishError
from archerfish.serve.host import EngineHost
from archerfish.serve.host_config import HostConfig
from archerfish.serve.signals import ignore_interrupts
from archerfish.serve.vitals import Heart

LAST_S = 5.0  # what a process may take to end when its parent has


def main() -> int:
    """Read the configuration, load, say that it serves, serve."""
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the cores belong to the compute thread
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    ignore_interrupts()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=HostConfig)
    try:
        host = EngineHost(config)
        threading.Thread(target=watch_parent, args=(host,), name="archerfish-parent", daemon=True).start()
        host.load_models()
        address = host.open()
    except ArcherfishError as error:
        say(told, {"error": error.message, "hint": error.hint})
        told.close()
        return error.exit_code
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    say(told, {"address": address})
    host.on_beat = Heart(told).beat
    host.run()
    return 0


def watch_parent(host: EngineHost) -> None:
    """The end of standard input is the end of who started this process: nobody is left to answer to."""
    while os.read(0, 4096):
        pass
    host.stop(0)
    time.sleep(LAST_S)
    os._exit(1)


def say(told: BinaryIO, values: dict[str, str]) -> None:
    told.write(msgspec.json.encode(values) + b"\n")
    told.flush()


if __name__ == "__main__":
    sys.exit(main())
