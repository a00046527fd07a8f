"""A process that compiles kernels into Triton's cache: jobs come in through stdin, and a line goes out for each."""
# mypy: allow-untyped-calls

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import ASTSource
from triton.runtime import cache
from triton.runtime.jit import JITCallable

find_hash = JITCallable.cache_key.fget


def ordered_hash(function: Any, callers: tuple[Any, ...] = ()) -> str:
    """The hash of a function's source, found after those of the functions that it calls.

    Triton's alone depends on which of these had a hash before, and so would differ from process to process.
    """
    if function.hash is None:
        names = function.__globals__
        for node in ast.walk(function.parse()):
            called = names.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = getattr(names.get(node.value.id), node.attr, None)
            if isinstance(called, JITCallable) and called is not function and called not in callers:
                ordered_hash(called, (*callers, function))
    found: str = find_hash(function)
    return found


JITCallable.cache_key = property(ordered_hash)


class Job(NamedTuple):
    """A kernel and what it is compiled for, as Triton describes it; all of it can be pickled."""

    module: str
    name: str
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    target: tuple[str, Any, int]


def compile_job(job: Job) -> None:
    """Compile a kernel, and the C code that launches it, unless they are in the cache."""
    kernel = getattr(importlib.import_module(job.module), job.name)
    source = ASTSource(kernel, job.signature, job.constants, job.attributes)
    compiled = triton.compile(source, target=GPUTarget(*job.target), options=dict(job.options))
    with contextlib.suppress(Exception):  # without a driver or a C compiler; the first launch would say so
        CudaLauncher(compiled.src, compiled.metadata)


def main() -> None:
    """Serve jobs until stdin ends. The first message is the key of Triton's files, which takes long to find."""
    jobs, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing else may write between the replies
    key = pickle.load(jobs)
    cache.triton_key = lambda: key
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            job = pickle.load(jobs)
            try:
                compile_job(job)
                replies.write("\n")
            except Exception as error:  # the parent tries again
                replies.write(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")
