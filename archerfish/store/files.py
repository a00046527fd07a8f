"""Files that appear whole or not at all: hashing writers, directories that replace each other, locks."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from archerfish.errors import WriteError
from archerfish.types import Progress

HASH_CHUNK_BYTES = 4 * 2**20
AT_FDCWD = -100
RENAME_EXCHANGE = 2


class HashingFile:
    """A binary file opened for writing that knows its length and SHA-256; also a sink for pyarrow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._hash = hashlib.sha256()
        self._file: BinaryIO = path.open("xb")

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._hash.update(data)
        num_bytes = memoryview(data).nbytes
        self.num_bytes += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._file.flush()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def sync(self) -> None:
        """Flush to the disk itself."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def write_file(path: Path, data: bytes) -> None:
    """Write a new file through to the disk."""
    file = HashingFile(path)
    try:
        file.write(data)
        file.sync()
    finally:
        file.close()


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        write_file(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sha256_of(path: Path, progress: Progress, what: str) -> str:
    """SHA-256 of a whole file, read in chunks."""
    total = path.stat().st_size
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
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
    """Turn an OSError of writing below `path` into a WriteError that says which file and why."""
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


def temporary_sibling(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def set_aside_sibling(target: Path) -> Path:
    return target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")


def siblings(target: Path, kind: str) -> list[Path]:
    prefix = f".{target.name}.{kind}-"
    if not target.parent.is_dir():
        return []
    return sorted(path for path in target.parent.iterdir() if path.name.startswith(prefix) and path.is_dir())


def recover(target: Path) -> None:
    """Finish what a killed process left at `target`; the caller holds the lock of `target`."""
    for aside in siblings(target, "old"):
        if target.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(target)
    for stale in siblings(target, "tmp"):
        shutil.rmtree(stale)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary sibling that takes the place of `target` when the block ends well, and vanishes when it does not.

    At every moment there is either the old directory or the new one at `target`, or `recover` can tell which it was. Two
    processes that write the same target take turns.
    """
    target = target.absolute()
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    lock_path = target.with_name(f".{target.name}.lock")
    with lock_or_write_error(lock_path, target):
        with write_errors(target):
            recover(target)
            temporary = temporary_sibling(target)
            temporary.mkdir()
        try:
            yield temporary
            with write_errors(target):
                for folder in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
                    sync_directory(folder)
                swap_in(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def lock_or_write_error(lock_path: Path, target: Path) -> Iterator[None]:
    """Hold a lock file across processes and remove it at the end, while it is still held."""
    from filelock import FileLock

    lock = FileLock(lock_path)
    with write_errors(target):
        lock.acquire()
    try:
        yield
    finally:
        lock_path.unlink(missing_ok=True)
        lock.release()


def swap_in(new: Path, target: Path) -> None:
    """Put the directory `new` at `target`; what was there is afterwards at `new`, or gone."""
    if not target.exists():
        new.rename(target)
    elif not exchange(new, target):
        if not any(target.iterdir()):
            target.rmdir()
            new.rename(target)
        else:
            aside = set_aside_sibling(target)
            target.rename(aside)
            new.rename(target)
            shutil.rmtree(aside, ignore_errors=True)
    sync_directory(target.parent)


def exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step where the kernel and the file system can; false where they cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(second))
