"""Text to token ids: what engines ask of a tokenizer, and the Rust one of models that read text."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from archerfish.errors import CorruptFileError, InvalidInputError
from archerfish.kernels.handle import Ids
from archerfish.text.chunks import ChunkTokenizer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer as RustTokenizer

Text = str | tuple[str, str]


NO_LIMIT = 10**9  # transformers writes a model_max_length of about 1e30 where there is none


class Tokenizer(Protocol):
    """What engines ask of the tokenizer of a model that writes text; safe to use from several threads at once."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_tokens(self) -> dict[int, str]:
        """Ids and names of the tokens that `skip_special_tokens` leaves out."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""

    @property
    def decoder_kinds(self) -> frozenset[str]:
        """Kinds of the steps that turn tokens into text; with "ByteLevel" alone, `token_bytes` says all."""

    def encode(self, text: str, add_special_tokens: bool = True, *, plain: bool = False) -> list[int]:
        """Token ids of a whole text. The names of special tokens in it stand for those tokens, unless `plain`."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the vocabulary does not have stand for nothing."""

    def id_to_token(self, token_id: int) -> str | None: ...

    def token_to_id(self, token: str) -> int | None: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What a token of bytes stands for; nothing for an unknown id."""

    def named_token(self, role: str) -> str | None:
        """The special token of a role: `bos_token`, `eos_token`, `pad_token`, `unk_token`."""


class TokenizedText(NamedTuple):
    """Token ids of one text, or of a pair with the segment that each token belongs to."""

    token_ids: Ids
    type_ids: Ids | None = None


class FastTokenizer:
    """The tokenizer of a model directory: its tokenizer.json, without the padding and truncation that some files carry."""

    def __init__(self, tokenizer_path: str | Path, max_length: int = 512) -> None:
        self._base: RustTokenizer = open_tokenizer(find_tokenizer(Path(tokenizer_path)))
        self.max_length = max_length
        self._base.enable_truncation(max_length)
        self._by_length: dict[int, RustTokenizer] = {self.max_length: self._base}
        self._chunks = ChunkTokenizer.of(self._base, max_length)

    def tokenize(self, texts: Sequence[Text], max_length: int | None = None) -> list[TokenizedText]:
        """Texts or pairs of texts, cut to max_length tokens, with the model's special tokens."""
        length = self.max_length if max_length is None else max_length
        tokenizer = self._cutting_at(length)
        if self._chunks is None or not are_strings(texts):
            return read(tokenizer, texts)
        found = self._chunks.tokenize(texts, length)
        rest = iter(read(tokenizer, [text for text, ids in zip(texts, found, strict=True) if ids is None]))
        return [next(rest) if ids is None else TokenizedText(ids) for ids in found]

    def encode(self, texts: str | Sequence[str], max_length: int = 512) -> dict[str, torch.Tensor]:
        """Padded `input_ids` and `attention_mask`, for callers that want rectangles; the engine itself never pads."""
        import torch

        rows = [row.token_ids for row in self.tokenize([texts] if isinstance(texts, str) else texts, max_length)]
        longest = max(map(len, rows), default=0)
        ids = torch.full((len(rows), longest), self.pad_id, dtype=torch.int64)
        mask = torch.zeros((len(rows), longest), dtype=torch.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.from_numpy(row)
            mask[place, : len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self._base.decode([int(i) for i in token_ids], skip_special_tokens=True)
        return text

    @property
    def pad_id(self) -> int:
        for token in ("[PAD]", "<pad>"):
            found = self._base.token_to_id(token)
            if found is not None:
                return int(found)
        return 0

    def _cutting_at(self, max_length: int) -> Any:
        """Truncation is state inside a Rust tokenizer, so each length has its own copy: threads may differ in theirs."""
        found = self._by_length.get(max_length)
        if found is None:
            num_special = self._base.num_special_tokens_to_add(False)
            if max_length <= num_special:
                raise InvalidInputError(f"max_length is {max_length}, but the special tokens alone are {num_special}.")
            found = copy.deepcopy(self._base)
            found.enable_truncation(max_length)
            self._by_length[max_length] = found
        return found


def are_strings(items: Sequence[Any]) -> TypeGuard[Sequence[str]]:
    """Whether all are strings, and of no subclass: quick for many."""
    return {str}.issuperset(map(type, items))


def read(tokenizer: RustTokenizer, texts: Sequence[Text]) -> list[TokenizedText]:
    """What the Rust tokenizer makes of texts or of pairs."""
    encodings = tokenizer.encode_batch_fast(list(texts)) if texts else []
    ids = arrays([encoding.ids for encoding in encodings])
    if are_strings(texts):
        return list(map(TokenizedText, ids))
    types = arrays([encoding.type_ids for encoding in encodings])
    pairs = zip(texts, ids, types, strict=True)
    return [TokenizedText(token_ids, None if isinstance(text, str) else type_ids) for text, token_ids, type_ids in pairs]


def arrays(lists: Sequence[Sequence[int]]) -> list[Ids]:
    """Lists as arrays, which lie one after the other: for many lists quicker than to make each by itself."""
    values = np.fromiter(chain.from_iterable(lists), np.int64)
    return [values[start:end] for start, end in pairwise(accumulate(map(len, lists), initial=0))]


def open_tokenizer(file: Path) -> RustTokenizer:
    """A tokenizer.json without its padding and truncation."""
    from tokenizers import Tokenizer

    try:
        tokenizer: RustTokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers package raises plain Exception
        raise CorruptFileError(f"The tokenizer {file} cannot be read: {error}.") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def find_tokenizer(path: Path) -> Path:
    """The tokenizer.json at a path, in it, or in the `tokenizer` directory of a converted model."""
    candidates = (path / "tokenizer.json", path / "tokenizer" / "tokenizer.json", path)
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        raise CorruptFileError(f"There is no tokenizer.json in {path}.")
    return found


def stated_max_length(settings: dict[str, Any]) -> int | None:
    """The length that a tokenizer_config.json states, if it states one."""
    limit = settings.get("model_max_length")
    return limit if isinstance(limit, int) and 0 < limit < NO_LIMIT else None


def read_settings(file: Path) -> dict[str, Any]:
    """A JSON object beside a tokenizer, such as tokenizer_config.json; empty where there is none."""
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptFileError(f"{file} is not valid JSON: {error}.") from error
    return settings if isinstance(settings, dict) else {}
