"""The World tokenizer of RWKV: at each position it takes the longest token that matches.

Tokens are byte strings, and every single byte is a token, so that every text can be encoded.
"""

from __future__ import annotations

import ast
import gzip
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from archerfish.errors import CorruptFileError
from archerfish.store.metadata import is_converted, read_metadata
from archerfish.store.source import WORLD_NAME
from archerfish.text.tokenizer import read_settings

# The file of that name in the PyPI package rwkv 0.8.32 (Apache-2.0, by Bo Peng), unchanged but for its compression.
BUNDLED = Path(__file__).with_name(f"{WORLD_NAME}.gz")
END_OF_TEXT = 0
MAX_TOKEN_BYTES = 1024  # bytes of a token; every prefix of a token is stored
END_NAME = "<|endoftext|>"
VOCAB_SIZE = 65536  # rows of models; the last ones have no token


class WorldTokenizer:
    """The tokenizer of a vocabulary file. path: the file, compressed or not, or its directory; None: the bundled one.

    The vocabulary is read on first use. Safe to use from several threads at once.
    """

    vocab_size = VOCAB_SIZE
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = (END_OF_TEXT,)
    special_tokens: dict[int, str] = {END_OF_TEXT: END_NAME}  # noqa: RUF012 (as Tokenizer has it)
    decoder_kinds = frozenset({"ByteLevel"})  # a text is its tokens' bytes

    def __init__(self, path: str | Path | None = None) -> None:
        given = BUNDLED if path is None else Path(path)
        self._file = given / WORLD_NAME if given.is_dir() else given

    @classmethod
    def find(cls, directory: str | Path, config: Mapping[str, Any] | None = None) -> WorldTokenizer | None:
        """The tokenizer of a directory with such a vocabulary, or of an RWKV model with the World vocabulary; else
        None.

        config is the model's; without it the files in the directory are read.
        """
        root = Path(directory)
        for folder in (root / "tokenizer", root):
            if (folder / WORLD_NAME).is_file():
                return cls(folder)
        if config is None:
            config = read_metadata(root).config if is_converted(root) else read_settings(root / "config.json")
        is_world = str(config.get("model_type")).startswith("rwkv") and config.get("vocab_size") == VOCAB_SIZE
        return cls() if is_world else None

    def encode(self, text: str, add_special_tokens: bool = True, *, plain: bool = False) -> list[int]:
        """Token ids of a text. There are no special tokens in texts, and none is added."""
        return self.encode_bytes(text.encode(errors="replace"))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of any bytes.

        `longest` has every prefix of every token, so a missing prefix has no longer match. The search starts at four
        bytes, a usual length.
        """
        longest = self._longest
        ids: list[int] = []
        get = longest.get
        append = ids.append
        place = 0
        end = len(data)
        while place < end:
            found = get(data[place : place + 4])
            if found is None:
                found = get(data[place : place + 3]) or get(data[place : place + 2]) or longest[data[place : place + 1]]
            else:
                until = place + 5
                while until <= end:
                    longer = get(data[place:until])
                    if longer is None:
                        break
                    found = longer
                    until += 1
            token_id, num_bytes = found
            append(token_id)
            place += num_bytes
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD; ids outside of the vocabulary are skipped."""
        parts = list(map(self.token_bytes, token_ids))
        if not skip_special_tokens:
            parts = [END_NAME.encode() if i == END_OF_TEXT else part for i, part in zip(token_ids, parts, strict=True)]
        return b"".join(parts).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an unknown id."""
        tokens = self._tokens
        return tokens[token_id] if 0 <= token_id < len(tokens) else b""

    def id_to_token(self, token_id: int) -> str | None:
        """The token as text. Bytes that are not UTF-8 become U+FFFD."""
        if token_id == END_OF_TEXT:
            return END_NAME
        return self.token_bytes(token_id).decode(errors="replace") or None

    def token_to_id(self, token: str) -> int | None:
        return END_OF_TEXT if token == END_NAME else self._ids.get(token.encode(errors="replace"))

    @cached_property
    def _tokens(self) -> list[bytes]:
        return read_vocabulary(self._file)

    @cached_property
    def _longest(self) -> dict[bytes, tuple[int, int]]:
        return longest_by_prefix(self._tokens)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: token_id for token_id, token in enumerate(self._tokens) if token}


def read_vocabulary(file: Path) -> list[bytes]:
    """Tokens by id, empty for missing ids. A line is an id, a Python literal (str or bytes), and its length in
    bytes."""
    try:
        raw = file.read_bytes()
        lines = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode().removesuffix("\n").split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"The vocabulary {file} cannot be read: {error}.") from error
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        try:
            token_id, token = parse_line(line)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise CorruptFileError(
                f"{file}, line {number}: {line[:60]!r} is not a token with its id and length."
            ) from error
        if token_id in tokens or not token:
            raise CorruptFileError(f"{file}, line {number}: the id {token_id} is there twice, or its token is empty.")
        tokens[token_id] = token
    missing = set(range(256)) - {token[0] for token in tokens.values() if len(token) == 1}
    if missing:
        raise CorruptFileError(f"{file} has no token for the byte {min(missing)}, so that not every text has tokens.")
    return [tokens.get(token_id, b"") for token_id in range(max(tokens) + 1)]


def parse_line(line: str) -> tuple[int, bytes]:
    head, _, rest = line.partition(" ")
    literal, _, length = rest.rpartition(" ")
    if "\\" in literal or literal[:1] not in ("'", '"'):
        value = ast.literal_eval(literal)
        token = value if isinstance(value, bytes) else str.encode(value)
    else:  # nearly all lines; twenty times faster than literal_eval
        token = literal[1:-1].encode()
    token_id = int(head)
    if not 0 < token_id < VOCAB_SIZE or not len(token) == int(length) <= MAX_TOKEN_BYTES:
        raise ValueError(line)
    return token_id, token


def longest_by_prefix(tokens: Sequence[bytes]) -> dict[bytes, tuple[int, int]]:
    """For every prefix of a token: id and length of the longest token that is a prefix of it."""
    longest: dict[bytes, tuple[int, int]] = {}
    for token_id, token in sorted(enumerate(tokens), key=lambda item: len(item[1])):
        for end in range(len(token) - 1, 0, -1):
            known = longest.get(token[:end])
            if known is not None:
                longest |= dict.fromkeys((token[:length] for length in range(end + 1, len(token))), known)
                break
        if token:
            longest[token] = (token_id, len(token))
    return longest
