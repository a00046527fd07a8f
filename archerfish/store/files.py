"""Files and directories that appear whole or not at all, and locks across processes."""

from __future__ import annotations

import glob
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from archerfish.errors import WriteError
from archerfish.types import Progress, no_progress

CHUNK_BYTES = 4 * 2**20  # that are read at a time


def write_file(path: Path, data: bytes | IO[bytes]) -> None:
    """Write a new file, from bytes or from an open file, through to the disk."""
    with path.open("xb") as file:
        shutil.copyfileobj(io.BytesIO(data) if isinstance(data, bytes) else data, file, CHUNK_BYTES)
        sync(file)


def sync(file: IO[bytes]) -> None:
    """Flush an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    temporary = sibling(path, "tmp")
    try:
        write_file(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sha256_of(path: Path, progress: Progress = no_progress, what: str = "") -> str:
    """SHA-256 of a whole file."""
    total = path.stat().st_size
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(done, total, what)
    return digest.hexdigest()


def sync_directory(path: Path) -> None:
    with suppress(OSError):  # some file systems do not sync directories
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of writing below `path` into a WriteError that names the file and the reason."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise WriteError(f"Cannot write {where}: {reason}.") from error


def check_free_space(directory: Path, needed_bytes: int) -> None:
    """Raise a WriteError when the disk below `directory` has less than `needed_bytes` free."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        needed, free = (f"{num_bytes / 1e6:,.0f} MB" for num_bytes in (needed_bytes, free_bytes))
        raise WriteError(f"Cannot write {directory}: it needs about {needed} and the disk has {free} free.")


def sibling(target: Path, kind: str) -> Path:
    """A new hidden path next to `target`; `kind` is tmp for what is being written, old for what was replaced."""
    return target.with_name(f".{target.name}.{kind}-{os.getpid()}-{os.urandom(4).hex()}")


def siblings(target: Path, kind: str) -> list[Path]:
    return sorted(target.parent.glob(f".{glob.escape(target.name)}.{kind}-*/"))


def recover(target: Path) -> None:
    """Clean up after a process that was killed while it wrote `target`. The caller holds the lock of `target`."""
    for old in siblings(target, "old"):
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)
    for stale in siblings(target, "tmp"):
        shutil.rmtree(stale)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that replaces `target` when the block succeeds, and is deleted when it fails.

    The old directory or the new one is at `target`, or `recover` puts it there. A lock keeps other processes from
    writing the same target at the same time.
    """
    target = target.absolute()
    with file_lock(target.with_name(f".{target.name}.lock"), target), write_errors(target):
        recover(target)
        temporary, old = sibling(target, "tmp"), sibling(target, "old")
        temporary.mkdir()
        try:
            yield temporary
            for folder in (temporary, *temporary.rglob("*/")):
                sync_directory(folder)
            if target.exists():
                target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old, ignore_errors=True)
            sync_directory(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def file_lock(lock_path: Path, target: Path) -> Iterator[None]:
    """Hold a lock file across processes. The file is removed at the end, while the lock is still held."""
    from filelock import FileLock

    lock = FileLock(lock_path)
    with write_errors(target):
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock_path.unlink(missing_ok=True)
        lock.release()


def shown_name(path: Path) -> str:
    """The name of the model in a directory or file: in the cache of huggingface_hub that of its repository."""
    repo = next((part for part in path.absolute().parts if part.startswith("models--")), "")
    if repo:
        return repo.removeprefix("models--").replace("--", "/", 1) + (f":{path.name}" if path.is_file() else "")
    return path.resolve().stem if path.is_file() else path.resolve().name
