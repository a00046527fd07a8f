"""The errors that archerfish raises.

    ArcherfishError
    ├── CallerError                  the caller can correct it
    │   ├── InvalidInputError        a text, list or body has the wrong form
    │   │   └── InputTooLargeError   an input is larger than a limit
    │   ├── InvalidOptionError       an option cannot have this value
    │   │   └── UnknownOptionError   an option does not exist
    │   ├── StaleHandleError         the node of a cache handle was cleared or evicted
    │   └── NotFoundError            a name or path does not exist
    │       ├── ModelNotFoundError
    │       └── UnknownLayerError
    ├── ModelError                   the files of a model have a problem
    │   ├── UnsupportedModelError    a kind of model, file or tensor is not supported
    │   ├── CorruptFileError         a file is truncated, altered or of another format
    │   ├── TensorError              a tensor is missing or has the wrong shape
    │   └── ValidationError          a conversion does not match its source
    ├── MachineError                 disk, memory or device
    │   ├── WriteError               a file could not be written
    │   ├── OutOfBlocksError         there are not enough free blocks of KV memory
    │   └── DeviceError              a device is missing or does not support the request
    │       └── OutOfMemoryError     a device or this process has too little memory
    ├── ServiceError                 the caller can try again later
    │   ├── UnreachableError         a package index or hub could not be reached
    │   ├── TooManyRequestsError          an engine holds as many requests as its options allow
    │   └── StoppedError             the engine or server has been stopped
    └── InvariantError               the engine's own accounting is wrong

Each class has the HTTP status and the code of a server's answer, the exit code of the command line, and a hint: what
the caller can do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar

MAX_NAME = 200  # characters of a misspelt name: comparing takes time by its length
MIN_SIMILARITY = 0.72  # of a suggested name to the given one, from 0 to 1
MAX_SIMILARITY_GAP = 0.12  # between the best suggestion and another one
PREFIX_CHARACTERS = "-/"  # of flags and chat commands; ignored in comparisons


class ArcherfishError(Exception):
    """Base of all errors of archerfish."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = "This is a bug in archerfish: please report it."
    param: str | None = None  # the parameter of a request that is wrong
    retry_after_s: float | None = None  # when the caller may try again

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class CallerError(ArcherfishError):
    status = 400
    code = "bad_request"
    exit_code = 2
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
    status = 404
    code = "not_found"
    exit_code = 3


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"
    default_hint = "Give a directory, a file, a Hugging Face id, or a built-in name (`archerfish list`)."


class UnknownLayerError(NotFoundError):
    code = "unknown_layer"


class ModelError(ArcherfishError):
    status = 500
    code = "model_error"
    exit_code = 4
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
    status = 500
    code = "machine_error"
    exit_code = 5
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
    status, code = 507, "out_of_memory"
    default_hint = (
        "Free memory or raise the limit of the process, or lower max_num_batched_tokens, max_num_seqs, max_cache_tokens "
        "or, on a GPU, gpu_memory_utilization."
    )

    @classmethod
    def of(cls, what: str, error: BaseException) -> OutOfMemoryError:
        """For an allocation that failed. what: the subject of the message."""
        return cls(f"{what} needs more memory than is left: {str(error) or 'an allocation failed'}.")


class ServiceError(ArcherfishError):
    status = 503
    code = "unavailable"
    exit_code = 6
    default_hint = "Try again later."


class UnreachableError(ServiceError):
    code = "unreachable"
    default_hint = "Check the network, or give the path of a directory that is already here."


class TooManyRequestsError(ServiceError):
    status, code = 429, "too_many_requests"


class StoppedError(ServiceError):
    code = "stopped"
    default_hint = ""


class InvariantError(ArcherfishError):
    code = "invariant_broken"


def nearest(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """The known names that are similar to a misspelt one, best first; else the longer names that begin with it."""
    import difflib

    if len(name) > MAX_NAME:
        return []
    wanted = name.lstrip(PREFIX_CHARACTERS).lower()
    choices = {choice.lstrip(PREFIX_CHARACTERS).lower(): choice for choice in known}
    close = difflib.get_close_matches(wanted, list(choices), n=most, cutoff=MIN_SIMILARITY)
    if close:
        ratios = [difflib.SequenceMatcher(None, choice, wanted).ratio() for choice in close]
        close = [choice for choice, ratio in zip(close, ratios, strict=True) if ratio >= ratios[0] - MAX_SIMILARITY_GAP]
    elif len(wanted) >= 3:
        close = sorted(choice for choice in choices if choice.startswith(wanted))[:most]
    return [choices[choice] for choice in close]


def did_you_mean(name: str, known: Iterable[str], most: int = 16) -> str:
    """A hint for an unknown name: the nearest known names, or all if there are few. most: 0 where the message has
    them."""
    choices = sorted(set(known))
    close = nearest(name, choices)
    if close:
        return f"Did you mean {' or '.join(repr(c) for c in close)}?"
    if 0 < len(choices) <= most:
        return f"Known: {', '.join(choices)}."
    return ""


def refuse_unknown(
    given: Iterable[str], known: Collection[str], what: str, hints: Mapping[str, str] | None = None
) -> None:
    """Raise an error for the first name that is not known, with its own hint or with the nearest known names."""
    for name in given:
        if name not in known:
            hint = (hints or {}).get(name) or did_you_mean(name, known)
            raise UnknownOptionError(f"Unknown {what}: {name!r}.", hint=hint)
