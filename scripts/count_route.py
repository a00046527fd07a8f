"""Counts what one request runs through: calls, functions and files of archerfish, in all processes of the service.

    python scripts/count_route.py [--list]

It starts `archerfish serve` with a tiny random Llama and the built-in embedding model, sends each request once to warm
up, and counts the next ones with `sys.setprofile`. A call is the start of a function, or one resumption of a coroutine
or generator. To count another checkout, set PYTHONPATH to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

NUM_RUNS = 5  # The run with the fewest calls counts: work that a timer starts falls into some runs by chance.
LIMIT_S = 120.0
SETTLE_S = 0.3  # A process still frees what a request held after the last byte of its answer.
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a streamed chat of 4 tokens": ("/v1/chat/completions", CHAT),
    "an embedding": ("/v1/embeddings", {"input": "A text about fish."}),
}
# Python runs this module at the start of every process of the service. A file `begin-N` starts the counting, `end-N`
# ends it.
HOOK = """
import collections, json, os, pathlib, sys, threading, time

package, control = os.environ["COUNT_ROUTE_PACKAGE"], pathlib.Path(os.environ["COUNT_ROUTE_CONTROL"])
counts = collections.Counter()
is_counting = False

def on_event(frame, event, argument):
    if is_counting and event == "call":
        code = frame.f_code
        is_ours = code.co_filename.startswith(package) and code.co_qualname != "Stall.check"  # which runs by the clock
        if is_ours and code.co_name not in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"):
            counts[code.co_filename[len(package) + 1 :], code.co_qualname] += 1

def wait_for(name):
    while not (control / name).exists():
        time.sleep(0.01)

def watch():
    global is_counting
    run = 0
    (control / f"process-{os.getpid()}").touch()
    while True:
        wait_for(f"begin-{run}")
        counts.clear()
        is_counting = True
        (control / f"begun-{run}-{os.getpid()}").touch()
        wait_for(f"end-{run}")
        is_counting = False
        rows = [[file, function, calls] for (file, function), calls in counts.items()]
        part = control / f"part-{run}-{os.getpid()}"
        part.write_text(json.dumps(rows))
        part.rename(control / f"counted-{run}-{os.getpid()}")
        run += 1

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(on_event)
sys.setprofile(on_event)
"""


def save_tiny_llama(directory: Path) -> None:
    """A model of two layers without weights (`--load-format dummy`), with a token for every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": len(letters),
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(config))


def package_directory() -> Path:
    import archerfish

    return Path(archerfish.__file__).parent


def start_service(directory: Path) -> subprocess.Popen[str]:
    (directory / "model").mkdir()
    save_tiny_llama(directory / "model")
    (directory / "hook").mkdir()
    (directory / "hook" / "sitecustomize.py").write_text(HOOK)
    (directory / "control").mkdir()
    package = package_directory()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(directory / "hook"), str(package.parent)]),
        "COUNT_ROUTE_PACKAGE": str(package),
        "COUNT_ROUTE_CONTROL": str(directory / "control"),
    }
    command = [sys.executable, "-m", "archerfish", "serve", "--port", "0", "--model", str(directory / "model")]
    options = ["--load-format", "dummy", "--dtype", "float32", "--num-threads", "1", "--max-cache-tokens", "4096"]
    return subprocess.Popen(
        [*command, *options], cwd=package.parent, env=environment, stdout=subprocess.PIPE, text=True
    )


def read_url(service: subprocess.Popen[str]) -> str:
    assert service.stdout is not None
    for line in service.stdout:
        found = re.search(r"http://[\d.]+:\d+", line)
        if found:
            return found[0]
    raise SystemExit("The service did not start.")


def send(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        answer.read()


def wait_for_all(control: Path, step: str) -> list[Path]:
    """The files `step-PID` of all processes that run, once they are all there."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        processes = [path.name.partition("-")[2] for path in control.glob("process-*")]
        running = [pid for pid in processes if Path(f"/proc/{pid}").exists()]
        found = [control / f"{step}-{pid}" for pid in running]
        if all(path.exists() for path in found):
            return found
        time.sleep(0.02)
    raise SystemExit(f"A process of the service did not answer ({step}).")


def count_request(url: str, body: dict[str, Any], control: Path, run: int) -> Counter[tuple[str, str]]:
    """Calls of each function of each file while the request is answered."""
    (control / f"begin-{run}").touch()
    wait_for_all(control, f"begun-{run}")
    send(url, body)
    time.sleep(SETTLE_S)
    (control / f"end-{run}").touch()
    counts: Counter[tuple[str, str]] = Counter()
    for path in wait_for_all(control, f"counted-{run}"):
        for file, function, calls in json.loads(path.read_text()):
            counts[file, function] += calls
    return counts


def show(name: str, counts: Counter[tuple[str, str]], *, with_list: bool) -> None:
    files = {file for file, _ in counts}
    print(f"{name}: {counts.total():,} calls through {len(counts)} functions in {len(files)} files")
    if with_list:
        for (file, function), calls in sorted(counts.items()):
            print(f"  {calls:5}  {file}: {function}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Count calls, functions and files that a request runs through.")
    parser.add_argument("--list", action="store_true", help="also list every function with its number of calls")
    with_list = parser.parse_args().list
    print(f"archerfish in {package_directory()}")
    with tempfile.TemporaryDirectory(prefix="count-route-") as folder:
        directory = Path(folder)
        service = start_service(directory)
        try:
            url = read_url(service)
            runs = itertools.count()
            for name, (path, body) in REQUESTS.items():
                send(url + path, body)
                counts = [count_request(url + path, body, directory / "control", next(runs)) for _ in range(NUM_RUNS)]
                show(name, min(counts, key=Counter.total), with_list=with_list)
        finally:
            service.terminate()
            service.wait(LIMIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
