"""The text of one sequence while it grows: tokens in, text that can be shown out.

Tokens of a byte-level vocabulary (Llama 3, Qwen, SmolLM) are bytes for an incremental UTF-8 decoder. Other tokens are
decoded by the tokenizer, a few at a time together with the tokens before them, because spaces depend on those.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Container, Sequence

from archerfish.params import SamplingParams
from archerfish.text.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
NUM_CONTEXT = 4  # tokens that are decoded again before new ones; one with visible text is enough
MAX_PROMPT_TAIL = 64  # last tokens of the prompt that are read
BYTES_TAIL = 16  # the same for byte-level vocabularies, where at most three bytes are an incomplete character
MAX_PENDING = 8  # tokens that are held back; a character has at most 4 bytes
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class OutputText:
    """Detokenises one sequence, finds its stop strings, and hides the token that ended it.

    Without a tokenizer, and for tokens of stages, which stand for no text, it only counts tokens. What `feed` gives,
    joined, is what the tokenizer decodes after the prompt. It gives only text that later tokens cannot change; after
    the last ones an incomplete character becomes U+FFFD. A character that begins in the prompt and ends in the output
    belongs to the output.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._decoder: ByteDecoder | WindowDecoder | None = None
        if tokenizer is not None and not params.stages:
            hidden = tokenizer.special_tokens if params.skip_special_tokens else {}
            kinds = tokenizer.decoder_kinds
            is_bytes = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
            visible = [i for i in prompt_token_ids[-(BYTES_TAIL if is_bytes else MAX_PROMPT_TAIL) :] if i not in hidden]
            decoder = ByteDecoder if is_bytes else WindowDecoder
            self._decoder = decoder(tokenizer, visible, hidden)
        self._shows_end = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop, self._shows_end) if params.stop else None
        self._min_tokens = params.min_tokens
        self.num_tokens = 0  # of the output: up to and with the token that completed a stop string
        self.num_shown = 0  # the same without the token that ended the sequence, unless that is shown

    def feed(
        self, token_ids: Sequence[int], finish_reason: str | None = None, end_token_ids: Container[object] = ()
    ) -> tuple[str, str | None]:
        """The text that tokens add, and the stop string that is complete now.

        end_token_ids: the last token is hidden if it is one of these and the sequence ends with "stop".
        """
        decoder, stops = self._decoder, self._stops
        is_end = finish_reason == "stop" and bool(token_ids) and token_ids[-1] in end_token_ids
        num_visible = len(token_ids) - (is_end and not self._shows_end)
        if decoder is None or stops is None:
            self.num_shown = self.num_tokens + num_visible
            self.num_tokens += len(token_ids)
            is_last = finish_reason is not None
            return "" if decoder is None else decoder.feed(token_ids[:num_visible], is_last), None
        texts: list[str] = []
        for token_id in token_ids[:num_visible]:
            if stops.matched is not None:
                break
            self.num_tokens += 1
            text = decoder.feed((token_id,))
            # Before min_tokens a stop string is ordinary text.
            texts.append(text if self.num_tokens < self._min_tokens else stops.feed(text))
        self.num_shown = self.num_tokens
        if stops.matched is None:
            self.num_tokens += len(token_ids) - num_visible
            if finish_reason is not None:
                text = decoder.feed((), is_last=True)
                texts += [text if self.num_tokens < self._min_tokens else stops.feed(text), stops.held]
        return "".join(texts), stops.matched


class ByteDecoder:
    """Decodes tokens that are bytes."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], hidden: Container[int]) -> None:
        self._token_bytes, self._hidden = tokenizer.token_bytes, hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(b"".join(map(self._token_bytes, context)))
        self._owes_prompt = bool(self._utf8.getstate()[0])  # a broken character that began in the prompt is not shown

    def feed(self, token_ids: Sequence[int], is_last: bool = False) -> str:
        data = b"".join([self._token_bytes(i) for i in token_ids if i not in self._hidden])
        text = self._utf8.decode(data, is_last)
        if self._owes_prompt and text:
            self._owes_prompt = False
            return text.removeprefix(BROKEN)
        return text


class WindowDecoder:
    """Decodes other tokens, together with the last ones before them."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], hidden: Container[int]) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._has_byte_tokens = "ByteFallback" in tokenizer.decoder_kinds
        self._may_break = "ByteLevel" in tokenizer.decoder_kinds
        tokens = [(i, token) for i in context if (token := tokenizer.id_to_token(i)) is not None]
        start = max(0, len(tokens) - NUM_CONTEXT)
        while start and self._is_byte(tokens[start][1]):
            start -= 1
        self._context = [token_id for token_id, _ in tokens[start:]]
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int], is_last: bool = False) -> str:
        end = 0
        for token_id in token_ids:
            token = self._tokenizer.id_to_token(token_id)
            if token is None or token_id in self._hidden:  # None: a row of the model beyond the vocabulary
                continue
            self._pending.append(token_id)
            # A run of byte tokens is decoded as a whole, so it is not final before its end.
            if not self._is_byte(token):
                end = len(self._pending)
        end = len(self._pending) if is_last else end
        if not end:
            return ""
        window = self._context + self._pending[:end]
        text = self._decode(window)
        if self._may_break and not is_last and text.endswith(BROKEN) and end < MAX_PENDING:
            return ""
        num_known = num_common(self._context_text, text)  # fewer if a character of the prompt is completed
        self._context, self._pending = window[-NUM_CONTEXT:], self._pending[end:]
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
    return next(
        (place for place, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), len(right)
    )


class StopStrings:
    """Finds the stop string that ends first in a stream of text; of several that end there, the longest.

    Text that may begin a stop string is held back. The cost is linear in the length of the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._matchers = [Matcher(stop) for stop in stops]
        self._include = include
        self.held = ""  # text that may begin a stop string
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that may be shown. None is shown after a stop string, which `matched` then names."""
        if self.matched is not None:
            return ""
        found = [(end, -len(one.stop), one.stop) for one in self._matchers if (end := one.feed(text)) is not None]
        text, num_before = self.held + text, len(self.held)
        if found:
            end, minus_length, self.matched = min(found)
            self.held = ""
            return text[: num_before + end + (0 if self._include else minus_length)]
        num_shown = len(text) - max(matcher.num_matched for matcher in self._matchers)
        self.held = text[num_shown:]
        return text[:num_shown]


class Matcher:
    """The longest beginning of one stop string with which the text so far ends (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop, self.num_matched = stop, 0
        self._shorter = [0]  # after i + 1 matched characters: the length of the next shorter match
        for character in stop[1:]:
            self._shorter.append(self._after(self._shorter[-1], character))

    def feed(self, text: str) -> int | None:
        """The position in `text` where the stop string first ends; None if it does not."""
        if not self.num_matched and self.stop[0] not in text:
            return None
        for end, character in enumerate(text, 1):
            self.num_matched = self._after(self.num_matched, character)
            if self.num_matched == len(self.stop):
                return end
        return None

    def _after(self, num_matched: int, character: str) -> int:
        while num_matched and self.stop[num_matched] != character:
            num_matched = self._shorter[num_matched - 1]
        return num_matched + (self.stop[num_matched] == character)
