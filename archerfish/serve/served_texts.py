"""Tokens and texts of the models that a backend serves: what the front end needs of their files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from archerfish.background import Lazy
from archerfish.engine.request_options import check_prompt_bytes, read_token_ids
from archerfish.engine.tts import VOCAB_SIZE
from archerfish.errors import ArcherfishError, InvalidInputError, UnsupportedModelError
from archerfish.params import SamplingParams
from archerfish.serve.catalog import ModelCard
from archerfish.serve.errors import InvalidParameterError
from archerfish.serve.schemas import MAX_TOKEN_ID
from archerfish.text.chat_template import ChatTemplate, texts_in
from archerfish.text.text_tokenizer import find_text_tokenizer
from archerfish.text.tokenizer import Tokenizer
from archerfish.text.tool_calls import PROMPTED_STYLE

T = TypeVar("T")
LONG_TEXT = 4096  # characters or tokens: work on more than this leaves the event loop
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


class ContextLengthError(InvalidInputError):
    """A prompt that leaves no room for an answer, in OpenAI's words."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_length: int, param: str, *, at_least: bool = False) -> None:
        stated = f"at least {num_tokens:,}" if at_least else f"{num_tokens:,}"
        super().__init__(
            f"This model's maximum context length is {max_length:,} tokens, answer included; the prompt has {stated}.",
            hint="Shorten it.",
        )
        self.param = param


class ServedText:
    """The text side of one model."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self._opened = Lazy(self._open)
        self._template = Lazy(lambda: ChatTemplate.find(card.directory, card.id, self.tokenizer))
        self._tokens: dict[int, tuple[str, list[int]]] = {}

    async def open(self) -> ServedText:
        """Read the files, if they have not been."""
        if not self._opened.is_made:
            await asyncio.to_thread(self._opened.get)
        return self

    def _open(self) -> tuple[Tokenizer | None, int]:
        """The tokenizer, and the characters of its longest token."""
        tokenizer = find_text_tokenizer(self.card.directory) if self.card.directory else None
        if tokenizer is None:
            return None, 1
        _ = tokenizer.special_tokens, tokenizer.decoder_kinds  # which are made now, not in the event loop
        return tokenizer, max(len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.vocab_size))

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._opened.get()[0]

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            speaks = " TTS tokens of a text: POST /v1/tts/tokens." if self.card.vocab_size >= VOCAB_SIZE else ""
            raise InvalidParameterError(f"{self.card.id} has no tokenizer: it takes and gives token ids alone.{speaks}", param)
        return self.tokenizer

    async def encode(self, text: str, param: str, add_special_tokens: bool = True, *, plain: bool = False) -> list[int]:
        tokenizer = self.need_tokenizer(param)
        self.check_bytes([text], param)
        return await aside(lambda: tokenizer.encode(text, add_special_tokens, plain=plain), len(text))

    async def encode_chat(self, messages: Sequence[dict[str, Any]], param: str, options: dict[str, Any]) -> list[int]:
        """Tokens of a conversation up to where the answer begins."""
        tokenizer = self.need_tokenizer(param)

        def render() -> list[int]:
            self.check_bytes(texts_in([*messages, *options.values()]), param)
            try:
                return self._template.get().encode(tokenizer, messages, **options)
            except InvalidInputError as error:
                raise blamed(error, param) from None
            except UnsupportedModelError:
                message = f"{self.card.id} has no chat template: it completes texts; give /v1/completions a prompt instead."
                raise InvalidParameterError(message, "model") from None

        size = chat_size(messages, options)
        return await aside(render, size if self._template.is_made else LONG_TEXT + 1)

    def check_bytes(self, texts: Iterable[str], param: str) -> None:
        """Refuse what has more bytes than the model's engine would tokenise."""
        if self.card.max_prompt_bytes:
            try:
                check_prompt_bytes(texts, self.card.max_prompt_bytes)
            except InvalidInputError as error:
                raise blamed(error, param) from None

    def stopping(self, params: SamplingParams) -> SamplingParams:
        """Parameters of an answer to a conversation, after `encode_chat`."""
        return self._template.get().stopping(params)

    def check_size(self, num_characters: int, param: str) -> None:
        """Refuse what must be too long before it is tokenized."""
        least = -(-num_characters // self._opened.get()[1])
        if least >= self.card.max_length:
            raise ContextLengthError(least, self.card.max_length, param, at_least=True)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Of a prompt that came as tokens: the model has them all."""
        try:
            read_token_ids(token_ids, self.card.vocab_size or MAX_TOKEN_ID)
        except InvalidInputError as error:
            raise blamed(error, param) from None

    def check_length(self, token_ids: Sequence[int], param: str) -> None:
        if not token_ids:
            raise InvalidParameterError("The prompt is empty; give at least one token.", param)
        if len(token_ids) >= self.card.max_length:
            raise ContextLengthError(len(token_ids), self.card.max_length, param)

    def call_style(self, options: dict[str, Any]) -> str:
        """How an answer to a conversation writes calls of tools; errors of a template are told by `encode_chat`."""
        try:
            return self._template.get().call_style(options.get("template_name"))
        except ArcherfishError:
            return PROMPTED_STYLE

    def token(self, token_id: int) -> tuple[str, list[int]]:
        """The text of one token by itself, and its bytes, which may be part of a character."""
        found = self._tokens.get(token_id)
        if found is None:
            raw = self._token_bytes(token_id)
            found = self._tokens[token_id] = raw.decode(errors="replace"), list(raw)
        return found

    def _token_bytes(self, token_id: int) -> bytes:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return f"token_id:{token_id}".encode()
        if "ByteLevel" in tokenizer.decoder_kinds:
            return tokenizer.token_bytes(token_id)
        token = tokenizer.id_to_token(token_id) or ""
        single = BYTE_TOKEN.fullmatch(token)
        return bytes([int(single[1], 16)]) if single else token.replace(WORD_MARK, " ").encode()


class ServedTexts:
    """The text sides of all models, by the directories of their files."""

    def __init__(self) -> None:
        self._known: dict[ModelCard, ServedText] = {}

    async def of(self, card: ModelCard) -> ServedText:
        if card not in self._known:
            self._known[card] = ServedText(card)
        return await self._known[card].open()


def chat_size(messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> int:
    """How much work it is to write and tokenize a conversation, in characters, roughly."""
    return sum(map(len, texts_in([*messages, *options.values()]))) + 1000 * len(options.get("tools") or ())


async def aside(work: Callable[[], T], size: int) -> T:
    """Run small work here and large work in a thread."""
    return work() if size <= LONG_TEXT else await asyncio.to_thread(work)


def blamed(error: InvalidInputError, param: str) -> InvalidInputError:
    """The same error with the parameter that it is about."""
    error.param = param  # type: ignore[attr-defined]
    return error
