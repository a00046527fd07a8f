"""TextTokenizer: the Rust tokenizer of a model that generates text. It neither truncates nor pads."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.errors import InputTooLargeError
from archerfish.store.source import token_name
from archerfish.store.tokenizer_checks import tokenizer_errors
from archerfish.text.tokenizer import Tokenizer, check_highest, find_tokenizer, open_tokenizer, read_settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

BYTES_PER_TOKEN, SPARE_BYTES = 16, 1 << 20  # a longer text does not fit the context; it is refused before it is read


class TextTokenizer:
    """The tokenizer of a model directory.

    config and generation_config are the model's; without them the files in the directory are read. num_ids: as in
    `open_tokenizer`. max_len: tokens of the longest context; 0: texts have no limit. The vocabulary is parsed on first
    use. Safe to use from several threads at once.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        num_ids: int | None = None,
        max_len: int = 0,
    ) -> None:
        file = self._file = find_tokenizer(Path(directory))
        self._num_ids = num_ids
        self._settings = read_settings(file.parent / "tokenizer_config.json")
        self._special_names = read_settings(file.parent / "special_tokens_map.json")
        self._config = read_settings(file.parent / "config.json") if config is None else config
        if generation_config is None:
            generation_config = read_settings(file.parent / "generation_config.json")
        self._generation_config = generation_config
        self._bytes: dict[int, bytes] = {}
        self._max_bytes = max_len * BYTES_PER_TOKEN + SPARE_BYTES if max_len else sys.maxsize

    @cached_property
    def _base(self) -> RustTokenizer:
        return open_tokenizer(self._file, self._num_ids)

    @cached_property
    def _plain(self) -> RustTokenizer:
        """A copy that reads the names of special tokens as text."""
        plain = copy.deepcopy(self._base)
        plain.encode_special_tokens = True
        return plain

    def encode(self, text: str, add_special_tokens: bool = True, *, plain: bool = False) -> list[int]:
        """Token ids of a text. Names of special tokens in it become those tokens, unless `plain`."""
        tokenizer = self._plain if plain else self._base
        data = text.encode(errors="replace")
        if len(data) > self._max_bytes:
            raise InputTooLargeError(f"The text has {len(data):,} bytes; the context takes {self._max_bytes:,}.")
        with tokenizer_errors():  # a batch of one: only batches release the interpreter lock
            found = tokenizer.encode_batch_fast([data.decode()], add_special_tokens=add_special_tokens)
        ids: list[int] = found[0].ids
        return [*self._missing_bos, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids outside of the vocabulary are skipped."""
        with tokenizer_errors():
            return str(self._base.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def to_json(self) -> str:
        """The contents of a tokenizer.json."""
        return str(self._base.to_str())

    def id_to_token(self, token_id: int) -> str | None:
        """The token as it is written in the vocabulary."""
        token: str | None = self._base.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._base.token_to_id(token)
        return found

    @cached_property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. A model may have more rows."""
        return int(self._base.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Ids and names of the tokens that `skip_special_tokens` leaves out."""
        added = self._base.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @cached_property
    def bos_token_id(self) -> int | None:
        name = token_name("bos_token", self._settings, self._special_names)
        return None if name is None else self.token_to_id(name)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end tokens of generation_config.json, else of config.json, and the tokenizer's eos_token."""
        inner = self._config.get("text_config")
        stated = (self._generation_config, self._config, inner if isinstance(inner, dict) else {})
        found = next((ids for source in stated if (ids := id_list(source.get("eos_token_id")))), [])
        name = token_name("eos_token", self._settings, self._special_names)
        own = None if name is None else self.token_to_id(name)
        return tuple(sorted({*found, *([] if own is None else [own])}))

    @cached_property
    def decoder_kinds(self) -> frozenset[str]:
        """Kinds of the steps that turn tokens into text, such as ByteLevel or ByteFallback."""
        decoder = self._base.decoder
        return frozenset() if decoder is None else frozenset(kinds_in(json.loads(decoder.__getstate__())))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; empty for an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            token: str = self._base.id_to_token(token_id) or ""
            own = [BYTE_OF_CHARACTER.get(character) for character in token]
            # An added token is written as text, not in the alphabet of bytes.
            found = token.encode() if None in own else bytes(value for value in own if value is not None)
            self._bytes[token_id] = found
        return found

    @cached_property
    def _missing_bos(self) -> list[int]:
        """The bos token, if tokenizer_config.json asks for it and tokenizer.json does not add it."""
        bos = self.bos_token_id
        if self._settings.get("add_bos_token") is not True or bos is None:
            return []
        with tokenizer_errors():
            return [] if self._base.encode("a").ids[:1] == [bos] else [bos]


def find_text_tokenizer(
    directory: str | Path,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    num_ids: int | None = None,
    max_len: int = 0,
) -> Tokenizer | None:
    """The tokenizer of a model directory, of either kind; None if it has none: such a model takes token ids only.

    num_ids: as in `open_tokenizer`. max_len: as in TextTokenizer.
    """
    root = Path(directory)
    if any(file.is_file() for file in (root / "tokenizer.json", root / "tokenizer" / "tokenizer.json")):
        return TextTokenizer(root, config=config, generation_config=generation_config, num_ids=num_ids, max_len=max_len)
    from archerfish.text.world_tokenizer import WorldTokenizer

    found = WorldTokenizer.find(root, config)
    if found is not None and num_ids is not None:
        check_highest(root, "token ids", found.vocab_size - 1, num_ids)
    return found


def id_list(value: object) -> list[int]:
    """The ids of an `eos_token_id`: one id, a list, or None."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and item >= 0]


def kinds_in(decoder: Mapping[str, Any]) -> list[str]:
    steps = decoder.get("decoders")
    if isinstance(steps, list):
        return [kind for step in steps for kind in kinds_in(step)]
    return [str(decoder.get("type"))]


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: printable ones unchanged, others from U+0100
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + place): value for place, value in enumerate(others)}


BYTE_OF_CHARACTER = byte_alphabet()
