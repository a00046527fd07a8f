"""The error tree: every class knows its status, code, exit code and what the caller can do."""

from __future__ import annotations

import inspect

import pytest

from archerfish import errors
from archerfish.errors import ArcherfishError, did_you_mean, nearest

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, ArcherfishError)]


def test_classes() -> None:
    assert len({cls.code for cls in CLASSES}) == len(CLASSES)
    for cls in CLASSES:
        is_callers = issubclass(cls, errors.CallerError | errors.TooManyRequestsError)
        assert (400 <= cls.status < 500) == is_callers and cls.exit_code > 0, cls
        assert cls.__name__ in str(errors.__doc__)


def test_message_and_hint() -> None:
    error = errors.ModelNotFoundError("No model 'x'.")
    assert str(error).startswith("No model 'x'. Give a directory")
    assert str(errors.CallerError("Bad.", hint="Do this.")) == "Bad. Do this."


def test_nearest_names() -> None:
    assert nearest("devise", ["device", "dtype", "port"]) == ["device"]
    assert nearest("temp", ["temperature", "stop", "top_p"]) == ["temperature"]
    assert nearest("topk", ["top_k", "top_p", "stop"]) == ["top_k"]
    assert nearest("n_tokens", ["max_tokens", "min_tokens", "stop"]) == ["min_tokens", "max_tokens"]
    assert did_you_mean("zzz", ["a", "b"]) == "Known: a, b."
    assert did_you_mean("zzz", [f"name{i}" for i in range(50)]) == ""


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("best_of", ["stop", "top_p", "seed"]),
        ("lora_request", ["request_id", "priority"]),
        ("tokenizer", ["block_size", "seed"]),
        ("--verbose", ["--block-size", "--seed", "--debug"]),
        ("--output", ["--stop", "--top-p", "--quiet"]),
        ("/exit", ["/reset", "/system"]),
        ("quantization", ["gpu_memory_utilization"]),
        ("tp", ["stop", "top_p"]),
    ],
    ids=str,
)
def test_dissimilar_names_are_not_suggested(name: str, known: list[str]) -> None:
    assert nearest(name, known) == [] and "Did you mean" not in did_you_mean(name, known)
