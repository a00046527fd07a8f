"""Detokenizer: the text of token ids as they come. It gives only text that later tokens cannot change.

Tokens of a byte-level vocabulary (Llama 3, Qwen, SmolLM) are bytes for an incremental UTF-8 decoder. Other tokens are decoded
by the tokenizer, a few at a time together with the tokens before them, because spaces depend on those.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence

from archerfish.text.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
NUM_CONTEXT = 4  # tokens that are decoded again before new ones; one with visible text is enough
MAX_PROMPT_TAIL = 64  # last tokens of the prompt that are read
BYTES_TAIL = 16  # the same for byte-level vocabularies, where at most three bytes are an incomplete character
MAX_PENDING = 8  # tokens that are held back; a character has at most 4 bytes
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """The text of one output. The results of `feed` and `finish`, joined, are what the tokenizer decodes after the prompt.

    A character that begins in the prompt and ends in the output belongs to the output.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._hidden = tokenizer.special_tokens if skip_special_tokens else {}
        kinds = tokenizer.decoder_kinds
        is_bytes = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
        visible = [i for i in prompt_ids[-(BYTES_TAIL if is_bytes else MAX_PROMPT_TAIL) :] if i not in self._hidden]
        self._decoder: ByteDecoder | WindowDecoder = (
            ByteDecoder(tokenizer.token_bytes, visible) if is_bytes else WindowDecoder(tokenizer, visible)
        )

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is final after these tokens."""
        if self._hidden:
            token_ids = [i for i in token_ids if i not in self._hidden]
        return self._decoder.feed(token_ids)

    def finish(self) -> str:
        """The remaining text. An incomplete character becomes U+FFFD."""
        return self._decoder.finish()


class ByteDecoder:
    """Decodes tokens that are bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes], context: Sequence[int]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(b"".join(map(token_bytes, context)))
        self._owes_prompt = bool(self._utf8.getstate()[0])  # a broken character that began in the prompt is not shown

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._own(self._utf8.decode(b"".join(map(self._token_bytes, token_ids))))

    def finish(self) -> str:
        return self._own(self._utf8.decode(b"", final=True))

    def _own(self, text: str) -> str:
        if self._owes_prompt and text:
            self._owes_prompt = False
            return text.removeprefix(BROKEN)
        return text


class WindowDecoder:
    """Decodes other tokens, together with the last ones before them."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._has_byte_tokens = "ByteFallback" in tokenizer.decoder_kinds
        self._may_break = "ByteLevel" in tokenizer.decoder_kinds
        tokens = [(i, token) for i in context if (token := tokenizer.id_to_token(i)) is not None]
        start = max(0, len(tokens) - NUM_CONTEXT)
        while start and self._is_byte(tokens[start][1]):
            start -= 1
        self._context = [token_id for token_id, _ in tokens[start:]]
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        end = 0
        for token_id in token_ids:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:  # a row of the model beyond the vocabulary
                continue
            self._pending.append(token_id)
            # A run of byte tokens is decoded as a whole, so it is not final before its end.
            if not self._is_byte(token):
                end = len(self._pending)
        return self._take(end, is_last=False) if end else ""

    def finish(self) -> str:
        return self._take(len(self._pending), is_last=True) if self._pending else ""

    def _take(self, num_tokens: int, *, is_last: bool) -> str:
        """The text of the first pending tokens, which then become context."""
        window = self._context + self._pending[:num_tokens]
        text = self._decode(window)
        if self._may_break and not is_last and text.endswith(BROKEN) and num_tokens < MAX_PENDING:
            return ""
        num_known = num_common(self._context_text, text)  # fewer if a character of the prompt is completed
        self._context, self._pending = window[-NUM_CONTEXT:], self._pending[num_tokens:]
        self._context_text = self._decode(self._context)
        return text[num_known:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _is_byte(self, token: str) -> bool:
        return self._has_byte_tokens and BYTE_TOKEN.fullmatch(token) is not None


def num_common(left: str, right: str) -> int:
    """The length of the common beginning of two texts."""
    if right.startswith(left):
        return len(left)
    return next((place for place, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), len(right))
