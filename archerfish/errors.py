"""Everything archerfish raises on purpose.

    ArcherfishError
    ├── CallerError                  the caller can mend it
    │   ├── InvalidInputError        a text, list or body that is not what was asked for
    │   │   └── InputTooLargeError   over a stated limit
    │   ├── InvalidOptionError       an option with a value that it does not take
    │   │   └── UnknownOptionError   an option that does not exist
    │   ├── StaleHandleError         a cache handle whose node has been cleared or evicted
    │   └── NotFoundError            something named does not exist
    │       ├── ModelNotFoundError
    │       └── UnknownLayerError
    ├── ModelError                   the files of a model are at fault
    │   ├── UnsupportedModelError    a kind of model, file or tensor that is not supported
    │   ├── CorruptFileError         truncated, altered or not what its name says
    │   ├── TensorError              a tensor is missing or has the wrong shape
    │   └── ValidationError          a conversion does not match its source
    ├── MachineError                 disk, memory or device
    │   ├── WriteError               a file could not be written
    │   ├── OutOfBlocksError         more blocks of KV memory are wanted than are free
    │   └── DeviceError              a device is missing or cannot do what was asked
    │       └── OutOfMemoryError     its memory is full
    ├── ServiceError                 try again later, or elsewhere
    │   ├── UnreachableError         a package index or hub could not be reached
    │   ├── OverloadedError          a queue is full
    │   └── StoppedError             the engine or server has been stopped
    └── InvariantError               our own books do not balance

Each class carries the HTTP status and the code that a server answers with, the exit code of the command line, and `hint`:
what the caller can do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

LEAST_LIKENESS, MOST_BEHIND = 0.72, 0.12  # how like what was written a suggested name is, and how far behind the best one
MARKS = "-/"  # of flags and commands: nothing that names have in common


class ArcherfishError(Exception):
    """Base of all errors that archerfish raises on purpose."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = "This is a fault of archerfish: please report it."

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class CallerError(ArcherfishError):
    status, code, exit_code = 400, "bad_request", 2
    default_hint = ""


class InvalidInputError(CallerError):
    code = "invalid_input"


class InputTooLargeError(InvalidInputError):
    status, code = 413, "input_too_large"


class InvalidOptionError(CallerError):
    code = "invalid_option"


class UnknownOptionError(InvalidOptionError):
    code = "unknown_option"


class StaleHandleError(CallerError):
    status, code = 409, "stale_handle"
    default_hint = "Match the prefix again."


class NotFoundError(CallerError):
    status, code, exit_code = 404, "not_found", 3


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"
    default_hint = "Give a directory, a file, a Hugging Face id, or a built-in name (`archerfish pull --list`)."


class UnknownLayerError(NotFoundError):
    code = "unknown_layer"


class ModelError(ArcherfishError):
    status, code, exit_code = 500, "model_error", 4
    default_hint = ""


class UnsupportedModelError(ModelError):
    code = "unsupported_model"


class CorruptFileError(ModelError):
    code = "corrupt_file"
    default_hint = "Download or convert the model again."


class TensorError(ModelError):
    code = "tensor_error"
    default_hint = "The weights do not belong to this configuration: convert the model again from its source."


class ValidationError(ModelError):
    code = "validation_failed"
    default_hint = "Nothing was written. Choose a wider type (--dtype float32), or check the source."


class MachineError(ArcherfishError):
    status, code, exit_code = 500, "machine_error", 5
    default_hint = ""


class WriteError(MachineError):
    status, code = 507, "write_failed"
    default_hint = "Choose a directory that can be written to and has room."


class OutOfBlocksError(MachineError):
    status, code = 503, "out_of_blocks"
    default_hint = "Evict or preempt first; a larger max_cache_tokens or gpu_memory_utilization gives more blocks."


class DeviceError(MachineError):
    code = "device_error"
    default_hint = "`archerfish doctor` shows what this machine has."


class OutOfMemoryError(DeviceError):
    code = "out_of_memory"
    default_hint = "Free memory on the device, or lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization."


class ServiceError(ArcherfishError):
    status, code, exit_code = 503, "unavailable", 6
    default_hint = "Try again later."


class UnreachableError(ServiceError):
    code = "unreachable"
    default_hint = "Check the network, or give the path of a directory that is already here."


class OverloadedError(ServiceError):
    status, code = 429, "overloaded"


class StoppedError(ServiceError):
    code = "stopped"
    default_hint = ""


class InvariantError(ArcherfishError):
    code = "invariant_broken"


def nearest(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """The known names that a misspelt one may stand for, best first: spelt nearly so, else longer ones that begin with it."""
    wanted = name.lstrip(MARKS).lower()
    choices = {choice.lstrip(MARKS).lower(): choice for choice in known}
    close = difflib.get_close_matches(wanted, list(choices), n=most, cutoff=LEAST_LIKENESS)
    if close:
        least = likeness(wanted, close[0]) - MOST_BEHIND
        close = [choice for choice in close if likeness(wanted, choice) >= least]
    elif len(wanted) >= 3:
        close = sorted(choice for choice in choices if choice.startswith(wanted))[:most]
    return [choices[choice] for choice in close]


def likeness(one: str, other: str) -> float:
    """From 0, nothing in common, to 1, equal."""
    return difflib.SequenceMatcher(None, other, one).ratio()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known ones, or all of them when there are few."""
    choices = sorted(set(known))
    close = nearest(name, choices)
    if close:
        return f"Did you mean {' or '.join(repr(c) for c in close)}?"
    if 0 < len(choices) <= 12:
        return f"Known: {', '.join(choices)}."
    return ""
