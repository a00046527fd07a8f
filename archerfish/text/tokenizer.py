"""Tokenizer, the interface that engines use, and FastTokenizer, the Rust tokenizer of embedding models."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from archerfish.errors import CorruptFileError, InvalidInputError, UnsupportedModelError
from archerfish.kernels.batches import Ids
from archerfish.kernels.select import import_torch
from archerfish.store import tokenizer_checks
from archerfish.store.source import optional_json, token_name
from archerfish.text.chunks import ChunkTokenizer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer as RustTokenizer

Text = str | tuple[str, str]
NO_LIMIT = 10**9  # transformers writes a model_max_length of about 1e30 where there is none


class Tokenizer(Protocol):
    """The tokenizer of a model that generates text; safe to use from several threads at once."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_tokens(self) -> dict[int, str]:
        """Ids and names of the tokens that `skip_special_tokens` leaves out."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""

    @property
    def decoder_kinds(self) -> frozenset[str]:
        """Kinds of the steps that turn tokens into text. If "ByteLevel" is the only one, a text is its tokens'
        bytes."""

    def encode(self, text: str, add_special_tokens: bool = True, *, plain: bool = False) -> list[int]:
        """Token ids of a text. Names of special tokens in it become those tokens, unless `plain`."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids outside of the vocabulary are skipped."""

    def id_to_token(self, token_id: int) -> str | None: ...

    def token_to_id(self, token: str) -> int | None: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an unknown id."""


class TokenizedText(NamedTuple):
    """Token ids of one text, or of a pair with the segment of each token."""

    token_ids: Ids
    type_ids: Ids | None = None
    is_cut: bool = False  # the text had more tokens than the model takes
    num_attended: int | None = None  # first tokens; attention masks the others; None: all tokens


class FastTokenizer:
    """The tokenizer.json of a model directory, without the padding and truncation that some files state."""

    def __init__(
        self,
        tokenizer_path: str | Path,
        max_length: int = 512,
        markers: Sequence[str] = (),
        *,
        lowers: bool = False,
        num_ids: int | None = None,
        num_types: int | None = None,
    ) -> None:
        """markers: tokens of the vocabulary that are taken whole where a text begins with them. lowers: words become
        lower case first. num_ids and num_types: as in `open_tokenizer`."""
        file = find_tokenizer(Path(tokenizer_path))
        self._base: RustTokenizer = open_tokenizer(file, num_ids, num_types)
        settings = self._settings = read_settings(file.parent / "tokenizer_config.json")
        self.max_length, self._side = max_length, "left" if settings.get("truncation_side") == "left" else "right"
        with tokenizer_checks.tokenizer_errors(file):
            add_end(self._base, settings)
            if lowers:
                lower_words(self._base)
            add_markers(self._base, markers)
            self._base.enable_truncation(max_length, direction=self._side)
            self._chunks = ChunkTokenizer.of(self._base, max_length) if self._side == "right" else None
        self._by_length: dict[int, RustTokenizer] = {self.max_length: self._base}

    def tokenize(self, texts: Sequence[Text], max_length: int | None = None) -> list[TokenizedText]:
        """Texts or pairs of texts, cut to max_length tokens, with the model's special tokens."""
        length = self.max_length if max_length is None else max_length
        tokenizer = self._cutting_at(length)
        chunks = self._chunks
        if chunks is None or not are_strings(texts):
            return read(tokenizer, texts)
        found = chunks.tokenize(texts, length)
        rest = iter(read(tokenizer, [text for text, ids in zip(texts, found, strict=True) if ids is None]))
        return [
            next(rest) if ids is None else TokenizedText(chunks.cut(ids, length), is_cut=len(ids) > length)
            for ids in found
        ]

    def encode(self, texts: str | Sequence[str], max_length: int = 512) -> dict[str, torch.Tensor]:
        """Padded `input_ids` and `attention_mask`. The engine itself never pads."""
        torch = import_torch()
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
        with tokenizer_checks.tokenizer_errors():
            return str(self._base.decode([int(i) for i in token_ids], skip_special_tokens=True))

    @property
    def pad_id(self) -> int:
        ids = (self._base.token_to_id(token) for token in ("[PAD]", "<pad>"))
        return next((int(token_id) for token_id in ids if token_id is not None), 0)

    @cached_property
    def special_ids(self) -> list[int]:
        """Tokens that are no part of a text."""
        return [token_id for token_id, token in self._base.get_added_tokens_decoder().items() if token.special]

    def ids_of(self, tokens: Sequence[str]) -> list[int]:
        """Ids of those tokens that the vocabulary has."""
        ids = map(self._base.token_to_id, tokens)
        return [int(token_id) for token_id in ids if token_id is not None]

    def expansion_token_id(self, token: str | None = None) -> int:
        """The token that is appended to queries: a given one, else the mask token, else the end token."""
        if self._settings.get("padding_side") == "left":
            raise UnsupportedModelError("Query expansion in front of the text (padding_side 'left') is not supported.")
        stated = [token_name(role, self._settings) for role in ("mask_token", "eos_token")]
        ids = self.ids_of([token] if token else list(filter(None, [stated[0], "[MASK]", "<mask>", stated[1]])))
        if not ids:
            named = f"token {token!r}" if token else "mask token"
            raise CorruptFileError(f"The tokenizer has no {named} for query expansion.")
        return ids[0]

    def _cutting_at(self, max_length: int) -> Any:
        """A tokenizer that truncates at max_length. Truncation is state of a Rust tokenizer, so each length has a
        copy."""
        found = self._by_length.get(max_length)
        if found is None:
            num_special = self._base.num_special_tokens_to_add(False)
            if max_length <= num_special:
                raise InvalidInputError(f"max_length is {max_length}, but the special tokens alone are {num_special}.")
            found = copy.deepcopy(self._base)
            found.enable_truncation(max_length, direction=self._side)
            self._by_length[max_length] = found
        return found


def are_strings(items: Sequence[Any]) -> TypeGuard[Sequence[str]]:
    """Whether all items are strings, and none is of a subclass of str."""
    return {str}.issuperset(map(type, items))


def read(tokenizer: RustTokenizer, texts: Sequence[Text]) -> list[TokenizedText]:
    """Tokenise texts or pairs with the Rust tokenizer."""
    with tokenizer_checks.tokenizer_errors():
        encodings = tokenizer.encode_batch_fast(list(texts)) if texts else []
    ids = arrays([encoding.ids for encoding in encodings])
    cut = [bool(encoding.overflowing) for encoding in encodings]
    if are_strings(texts):
        return [TokenizedText(token_ids, None, is_cut) for token_ids, is_cut in zip(ids, cut, strict=True)]
    types = arrays([encoding.type_ids for encoding in encodings])
    return [
        TokenizedText(token_ids, None if isinstance(text, str) else type_ids, is_cut)
        for text, token_ids, type_ids, is_cut in zip(texts, ids, types, cut, strict=True)
    ]


def arrays(lists: Sequence[Sequence[int]]) -> list[Ids]:
    """Arrays of some lists, as views of one array, which is faster than an array for each list."""
    values = np.fromiter(chain.from_iterable(lists), np.int64)
    return [values[start:end] for start, end in pairwise(accumulate(map(len, lists), initial=0))]


def open_tokenizer(file: Path, num_ids: int | None = None, num_types: int | None = None) -> RustTokenizer:
    """A tokenizer.json without its padding and truncation.

    num_ids and num_types: rows of the model's tables of tokens and of types. A tokenizer that can give higher ids
    raises a CorruptFileError. Added tokens are an exception: published models have some without a row (Gemma 3's
    image token in its text models), so such tokens are dropped, and a text that names one is read as plain text.
    """
    tokenizer = tokenizer_checks.open_tokenizer(file.read_bytes(), file)
    if num_ids is not None:
        from tokenizers import Tokenizer

        with tokenizer_checks.tokenizer_errors(file):
            dropped = check_ids(tokenizer, file, num_ids, num_types)
            tokenizer = Tokenizer.from_str(without_tokens(tokenizer, dropped, num_ids)) if dropped else tokenizer
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def check_ids(tokenizer: RustTokenizer, file: Path, num_ids: int, num_types: int | None) -> set[str]:
    """Raises an error if the vocabulary or a template has an id beyond a table. Returns the added tokens beyond it."""
    ids = tokenizer.get_vocab()
    dropped = {token.content for i, token in tokenizer.get_added_tokens_decoder().items() if i >= num_ids}
    for token in dropped:
        del ids[token]
    types = [0]
    template_ids = [0]

    def note(pairs: list[tuple[str, Any]]) -> None:
        for name, value in pairs:
            numbers = [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]
            (types if name == "type_id" else template_ids).extend(numbers)

    if tokenizer.post_processor is not None:
        json.loads(tokenizer.post_processor.__getstate__(), object_pairs_hook=note)
    check_highest(file, "token ids", max(chain(template_ids, ids.values())), num_ids)
    if num_types is not None:
        check_highest(file, "type ids", max(types), num_types)
    return dropped


def check_highest(file: Path, what: str, highest: int, num_rows: int) -> None:
    if highest >= num_rows:
        message = f"The tokenizer {file} gives {what} up to {highest:,}, but the model's table has {num_rows:,} rows."
        raise CorruptFileError(message, hint="Use the tokenizer that was made for this model.")


def without_tokens(tokenizer: RustTokenizer, dropped: set[str], num_ids: int) -> str:
    """A tokenizer.json without some added tokens, whose ids are `num_ids` and higher."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in dropped]
    vocabulary = content["model"]["vocab"]  # a list where places are ids
    kept = (
        vocabulary[:num_ids] if isinstance(vocabulary, list) else {t: i for t, i in vocabulary.items() if i < num_ids}
    )
    content["model"]["vocab"] = kept
    return json.dumps(content)


def add_end(tokenizer: RustTokenizer, settings: dict[str, Any]) -> None:
    """Have the end token behind each text if tokenizer_config.json asks for it and tokenizer.json does not add it."""
    name, own = token_name("eos_token", settings), tokenizer.encode("").ids
    end = None if name is None or settings.get("add_eos_token") is not True else tokenizer.token_to_id(name)
    if end is None or own[-1:] == [end]:
        return
    from tokenizers import processors

    first = token_name("bos_token", settings) if settings.get("add_bos_token") is True else None
    begin = [tokenizer.token_to_id(first)] if first is not None and not own else own
    tokens = [(str(tokenizer.id_to_token(token_id)), token_id) for token_id in (*begin, end)]
    one, two = ([f"{token}:{kind}" for token, _ in tokens] for kind in (0, 1))
    single, pair = [*one[:-1], "$A:0", one[-1]], [*two[:-1], "$B:1", two[-1]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(single), pair=" ".join([*single, *pair]), special_tokens=list(dict.fromkeys(tokens))
    )


def lower_words(tokenizer: RustTokenizer) -> None:
    """Have words in lower case, but not names of special tokens."""
    from tokenizers import normalizers

    own = tokenizer.normalizer
    if not (isinstance(own, normalizers.BertNormalizer) and own.lowercase):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([own] if own else [])])


def add_markers(tokenizer: RustTokenizer, markers: Sequence[str]) -> None:
    """Take markers whole, with the space behind them if the vocabulary has them so. Others stay text."""
    from tokenizers import AddedToken

    for marker in filter(str.strip, markers):
        names = [name for name in (marker, marker.split()[0]) if tokenizer.token_to_id(name) is not None]
        if names and tokenizer.encode(names[0], add_special_tokens=False).tokens != names[:1]:
            tokenizer.add_special_tokens([AddedToken(names[0], normalized=False)])


def find_tokenizer(path: Path) -> Path:
    """The tokenizer.json at a path, inside of it, or in its `tokenizer` directory."""
    candidates = (path / "tokenizer.json", path / "tokenizer" / "tokenizer.json", path)
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        raise CorruptFileError(f"There is no tokenizer.json in {path}.")
    return found


def stated_max_length(settings: dict[str, Any]) -> int | None:
    """The model_max_length of a tokenizer_config.json, if it has one."""
    limit = settings.get("model_max_length")
    return limit if isinstance(limit, int) and 0 < limit < NO_LIMIT else None


def read_settings(file: Path) -> dict[str, Any]:
    """The object in a JSON file such as tokenizer_config.json; empty if there is no file."""
    return optional_json(file) or {}
