"""Clients of a service, as a program for the namespace of clients. It prints one JSON object.

load URL WORKERS FILE          until FILE exists, WORKERS clients send requests one after another
prompts URL ROUNDS URL...      prompts without anything in common, in rounds, to the front ends in turn
handle ROUNDS                  the same through a handle of Ray Serve
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ["fish", "boat", "reef", "tide", "gull", "sand", "wave", "crab"]
PROMPTS = [" ".join(f"{word} {number}" for number in range(60)) for word in WORDS]
LONGEST_S = 240.0


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=90) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def load(url: str, workers: str, file: str) -> dict[str, Any]:
    answered = [0]
    failed = list[str]()
    end = time.monotonic() + LONGEST_S

    def work(worker: int) -> None:
        turn = 0
        while not Path(file).exists() and time.monotonic() < end:
            turn += 1
            try:
                found = post(
                    url, {"prompt": f"Once upon a time {worker} {turn}", "max_tokens": 100, "ignore_eos": True}
                )
                assert found["usage"]["completion_tokens"] == 100
                answered[0] += 1
            except Exception as error:
                text = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                failed.append(f"{error!r} {text}")
                time.sleep(0.2)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(int(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"answered": answered[0], "failed": failed}


def rounds(number: str, complete: Callable[[int, str, int], int]) -> dict[str, Any]:
    """How many tokens of the prompts were cached in the rounds after the first, one after another."""
    # All at once with long answers, so that replicas share them.
    first = [threading.Thread(target=complete, args=(0, prompt, 300)) for prompt in PROMPTS]
    for thread in first:
        thread.start()
    for thread in first:
        thread.join()
    time.sleep(1.5)  # front ends learn what is cached a few times a second
    places = [(turn + index, prompt, 2) for turn in range(1, int(number)) for index, prompt in enumerate(PROMPTS)]
    return {"cached": [complete(*place) for place in places]}


def prompts(number: str, *urls: str) -> dict[str, Any]:
    def complete(turn: int, prompt: str, max_tokens: int) -> int:
        usage = post(urls[turn % len(urls)], {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    return rounds(number, complete)


def handle(number: str) -> dict[str, Any]:
    import ray
    from ray import serve

    ray.init(address="auto", log_to_driver=False)
    engines = serve.get_deployment_handle("engines", "archerfish-engines").options(stream=True)

    def complete(turn: int, prompt: str, max_tokens: int) -> int:
        params = {"max_tokens": max_tokens, "ignore_eos": True}
        parts = [*engines.generate.remote({"prompt": prompt, "params": params, "stream": True})]
        return int(parts[-1].get("num_cached_tokens", 0))

    return rounds(number, complete)


if __name__ == "__main__":
    programs: dict[str, Callable[..., dict[str, Any]]] = {"load": load, "prompts": prompts, "handle": handle}
    print(json.dumps(programs[sys.argv[1]](*sys.argv[2:])))
