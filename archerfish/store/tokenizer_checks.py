"""Opening a tokenizer.json, which comes with a model's files and so is not trusted.

The Rust library has no limits: a normalizer may make a text a million times longer, which ends the process, and a
regular expression may take hours or panic.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.store.format import first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

MAX_GROWTH = 64  # bytes of a normalized text for each byte of the text; Llama 2 has 12
MAX_WORD = 1000  # characters of a word that WordPiece cuts, in time that grows with their square
CHARSMAP_SHARE = 16  # bytes of the longest text in a precompiled table per step of growth; NFKC's table has 33
# How the parts that are checked look in a tokenizer.json. Vocabularies map words to numbers, so they have none of them.
MARKS = [re.compile(mark) for mark in (rb'pattern"\s*:\s*\{', rb'prepend"\s*:\s*"', rb'charsmap"\s*:', rb"\\u00[2-7]")]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_SPLIT = TEKKEN_SPLIT.replace(r"\p{M}]+|", rf"\p{{M}}]+{ENDINGS}|").replace(r"\p{M}]*|", rf"\p{{M}}]*{ENDINGS}|")
GPT4O_SPLIT = GPT4O_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
# Other regular expressions are tried in a process of their own, which takes 0.2 s.
KNOWN = {LLAMA3_SPLIT, QWEN2_SPLIT, TEKKEN_SPLIT, GPT4O_SPLIT, " {2,}", r"\s+", r"\s", "[0-9]", r"\p{N}{1,3}"}
PROBE_CHARACTERS = " \na1A.\u00e9\u4e2d"
PROBE = (
    "import json, resource, sys; from tokenizers import Tokenizer; data, texts = json.load(sys.stdin);"
    "resource.setrlimit(resource.RLIMIT_CPU, (2, 2)); one = Tokenizer.from_str(data);"
    "[one.decode(one.encode(text).ids) for text in texts]"
)
PROBE_TIMEOUT_S = 8.0


@contextmanager
def tokenizer_errors(where: object = None) -> Iterator[None]:
    """Turns panics of the tokenizers library, which are BaseExceptions, into errors of the model.

    where: the files that are opened; other errors of the library become a CorruptFileError, too.
    """
    try:
        yield
    except (CorruptFileError, UnsupportedModelError):
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if where is not None and (isinstance(error, Exception) or is_panic):
            raise CorruptFileError(f"{where} does not hold a sound tokenizer: {first_line(error)}") from error
        if is_panic:
            raise UnsupportedModelError(f"The model's tokenizer cannot read this text: {first_line(error)}") from error
        raise


def open_tokenizer(data: bytes, where: object) -> RustTokenizer:
    """The tokenizer of a tokenizer.json whose parts are bounded."""
    from tokenizers import Tokenizer

    with tokenizer_errors(where):
        if any(mark.search(data) for mark in MARKS):
            check_parts(data, where)
        tokenizer: RustTokenizer = Tokenizer.from_buffer(data)
    longest = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if longest > MAX_WORD:
        raise UnsupportedModelError(f"{where} cuts words of {longest:,} characters; the limit is {MAX_WORD:,}.")
    return tokenizer


def check_parts(data: bytes, where: object) -> None:
    """Refuse steps that make a text much longer, and regular expressions that take long or panic."""
    parts: list[dict[str, Any]] = []

    def note(part: dict[str, Any]) -> dict[str, Any]:
        parts.append(part)
        return part

    document = json.loads(data, object_hook=note)
    growth = math.prod(map(growth_of, parts))
    if growth > MAX_GROWTH:
        raise UnsupportedModelError(f"{where} can make a text {growth:,} times longer; the limit is {MAX_GROWTH}.")
    patterns = {part["Regex"] for part in parts if isinstance(part.get("Regex"), str)} - KNOWN
    if not patterns:
        return
    import subprocess  # takes long to import

    characters = [*PROBE_CHARACTERS, *sorted(set("".join(patterns)))[:64]]
    texts = [character * 99 + end for character in characters for end in ("!", character)]
    small = json.dumps({**document, "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})
    arguments = [sys.executable, "-I", "-c", PROBE]
    given = json.dumps([small, texts]).encode()
    try:
        subprocess.run(arguments, input=given, capture_output=True, timeout=PROBE_TIMEOUT_S, check=True)
    except subprocess.SubprocessError as error:
        message = f"{where} has a regular expression that takes too long or fails ({min(patterns):.100})."
        raise UnsupportedModelError(message) from error


def growth_of(part: dict[str, Any]) -> int:
    """Returns how many times longer a step of a normalizer or a decoder can make a text."""
    pattern, content, prepended, table = map(part.get, ("pattern", "content", "prepend", "precompiled_charsmap"))
    if isinstance(pattern, dict) and isinstance(content, str):
        num_found = len(str(pattern.get("String", "")).encode())
        num_bytes = len(content.encode())
        return max(1, -(-num_bytes // num_found)) if num_found else 1 + num_bytes
    if isinstance(table, str):
        read = base64.b64decode(table)
        texts = read[4 + int.from_bytes(read[:4], "little") :].split(b"\0")
        return max(1, max(map(len, texts)) // CHARSMAP_SHARE)
    return 1 + len(prepended.encode()) if isinstance(prepended, str) else 1
