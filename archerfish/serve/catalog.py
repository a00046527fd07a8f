"""The models that a backend serves: their names, their tokenizers and templates, and how a request is addressed to one."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from archerfish.background import Lazy
from archerfish.engine.request_maker import check_prompt_bytes, read_token_ids
from archerfish.engine.tts import VOCAB_SIZE
from archerfish.errors import ArcherfishError, InvalidInputError, UnsupportedModelError
from archerfish.params import SamplingParams
from archerfish.serve.answers import Model
from archerfish.serve.bodies import MAX_TOKEN_ID
from archerfish.serve.client import Backend
from archerfish.serve.errors import InvalidParameterError, UnservedModelError, with_param
from archerfish.serve.host_config import hint_for, names_of
from archerfish.serve.wire import Query, Report
from archerfish.text.chat_template import ChatTemplate, texts_in
from archerfish.text.text_tokenizer import find_text_tokenizer
from archerfish.text.tokenizer import Tokenizer
from archerfish.text.tool_calls import PROMPTED_STYLE

T = TypeVar("T")
Kind = Literal["generation", "embedding", "cross-encoder"]
REFRESH_S = 1.0  # an unknown name makes the catalog ask for the models again, but not more often than this
LONG_TEXT = 4096  # characters or tokens: work on more than this leaves the event loop
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


class ContextLengthError(InvalidInputError):
    """A prompt that leaves no room for an answer."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_length: int, param: str, *, at_least: bool = False) -> None:
        found = f"at least {num_tokens:,}" if at_least else f"{num_tokens:,}"
        super().__init__(
            f"This model's maximum context length is {max_length:,} tokens, answer included; the prompt has {found}.",
            hint="Shorten it.",
        )
        self.param = param


@dataclass(frozen=True)
class ModelCard:
    """What the engine process says of a model."""

    id: str
    kind: Kind
    max_length: int
    dimension: int = 0
    directory: str = ""
    aliases: tuple[str, ...] = ()
    vocab_size: int = 0
    max_prompt_bytes: int = 0  # 0: no limit
    is_tts: bool = False  # it generates tokens of speech and no text

    @classmethod
    def read(cls, values: dict[str, Any]) -> ModelCard:
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values and name != "aliases"}
        return cls(**known, aliases=tuple(values.get("aliases", ())))

    @property
    def names(self) -> list[str]:
        return names_of(self.id, self.aliases)


class ModelText:
    """The tokenizer and the chat template of one model."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self._opened = Lazy(self._open)
        self._template = Lazy(lambda: ChatTemplate.find(card.directory, card.id, self.tokenizer))
        self._tokens: dict[int, tuple[str, list[int]]] = {}

    async def open(self) -> ModelText:
        """Read the files, unless that is done."""
        if not self._opened.is_made:
            await asyncio.to_thread(self._opened.get)
        return self

    def _open(self) -> tuple[Tokenizer | None, int]:
        """The tokenizer, and the characters of its longest token."""
        tokenizer = find_text_tokenizer(self.card.directory) if self.card.directory else None
        if tokenizer is None:
            return None, 1
        _ = tokenizer.special_tokens, tokenizer.decoder_kinds  # computed now and kept, not later in the event loop
        return tokenizer, max(len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.vocab_size))

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._opened.get()[0]

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            hint = " TTS tokens of a text: POST /v1/tts/tokens." if self.card.vocab_size >= VOCAB_SIZE else ""
            raise InvalidParameterError(f"{self.card.id} has no tokenizer: it takes and gives token ids alone.{hint}", param)
        return self.tokenizer

    async def encode(self, text: str, param: str, add_special_tokens: bool = True, *, plain: bool = False) -> list[int]:
        tokenizer = self.need_tokenizer(param)
        self.check_bytes([text], param)
        return await in_thread(lambda: tokenizer.encode(text, add_special_tokens, plain=plain), len(text))

    async def encode_chat(self, messages: Sequence[dict[str, Any]], param: str, options: dict[str, Any]) -> list[int]:
        """Tokens of a conversation up to where the answer begins. options: tools and other values for the template."""
        tokenizer = self.need_tokenizer(param)

        def render() -> list[int]:
            self.check_bytes(texts_in([*messages, *options.values()]), param)
            try:
                return self._template.get().encode(tokenizer, messages, **options)
            except InvalidInputError as error:
                raise with_param(error, param) from None
            except UnsupportedModelError:
                message = f"{self.card.id} has no chat template: it completes texts; give /v1/completions a prompt instead."
                raise InvalidParameterError(message, "model") from None

        size = chat_size(messages, options)
        return await in_thread(render, size if self._template.is_made else LONG_TEXT + 1)

    def check_bytes(self, texts: Iterable[str], param: str) -> None:
        """Refuse texts with more bytes than the engine would tokenise."""
        if self.card.max_prompt_bytes:
            try:
                check_prompt_bytes(texts, self.card.max_prompt_bytes)
            except InvalidInputError as error:
                raise with_param(error, param) from None

    def add_stops(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the stop strings of the chat template, after `encode_chat`."""
        return self._template.get().stopping(params)

    def check_size(self, num_characters: int, param: str) -> None:
        """Refuse a text that must be too long, before it is tokenised."""
        num_tokens = -(-num_characters // self._opened.get()[1])
        if num_tokens >= self.card.max_length:
            raise ContextLengthError(num_tokens, self.card.max_length, param, at_least=True)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse token ids outside of the vocabulary."""
        try:
            read_token_ids(token_ids, self.card.vocab_size or MAX_TOKEN_ID)
        except InvalidInputError as error:
            raise with_param(error, param) from None

    def check_length(self, token_ids: Sequence[int], param: str) -> None:
        if not token_ids:
            raise InvalidParameterError("The prompt is empty; give at least one token.", param)
        if len(token_ids) >= self.card.max_length:
            raise ContextLengthError(len(token_ids), self.card.max_length, param)

    def call_style(self, options: dict[str, Any]) -> str:
        """How answers write calls of tools. `encode_chat` reports errors of the template."""
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


def chat_size(messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> int:
    """Roughly how much work it is to render and tokenise a conversation, in characters."""
    return sum(map(len, texts_in([*messages, *options.values()]))) + 1000 * len(options.get("tools") or ())


async def in_thread(work: Callable[[], T], size: int) -> T:
    """Run large work in a thread and small work at once."""
    return work() if size <= LONG_TEXT else await asyncio.to_thread(work)


class Catalog:
    """The models of a backend, asked for when they are first needed."""

    def __init__(
        self, backend: Backend, credentials: str = "", *, caller_of: Callable[[Request], str] = lambda request: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """credentials: the password of this front end, which allows it to name the tenant of a request, `caller_of`."""
        self.backend = backend
        self.started_at = int(time.time())
        self.credentials, self._caller_of, self._clock = credentials, caller_of, clock
        self._cards: list[ModelCard] = []
        self._texts: dict[ModelCard, ModelText] = {}
        self._asked_at = float("-inf")
        self._ids = itertools.count()

    def new_id(self) -> str:
        return f"r{next(self._ids)}"

    def address(self, request: Request, card: ModelCard) -> dict[str, Any]:
        """The members of a message that name a request, its model and its tenant."""
        return {
            "request_id": self.new_id(), "model": card.id, "credentials": self.credentials, "tenant": self._caller_of(request)
        }

    async def cards(self) -> list[ModelCard]:
        if not self._cards:
            await self.refresh()
        return self._cards

    async def refresh(self) -> None:
        answer = await self.backend.ask(Query(request_id=self.new_id(), about="models", credentials=self.credentials))
        assert isinstance(answer, Report)
        self._cards = [ModelCard.read(values) for values in answer.values["models"]]
        self._asked_at = self._clock()

    async def text_of(self, card: ModelCard) -> ModelText:
        if card not in self._texts:
            self._texts[card] = ModelText(card)
        return await self._texts[card].open()

    async def named(self, name: str) -> ModelCard:
        """The model of a name, of any kind."""
        for is_last in (False, True):
            fitting = [card for card in await self.cards() if name in card.names]
            if fitting:
                return next((card for card in fitting if card.id == name), fitting[0])
            if is_last or self._clock() - self._asked_at < REFRESH_S:
                break
            await self.refresh()
        hint = hint_for(name, [card.id for card in await self.cards()])
        raise UnservedModelError(f"The model {name!r} is not served here.", hint=hint)

    async def find(self, name: str | None, *kinds: Kind) -> ModelCard:
        """The model of a name, if it is of one of these kinds. Without a name: the first model of the first kind there is."""
        if name is None:
            cards = await self.cards()
            found = next((card for kind in kinds for card in cards if card.kind == kind), None)
            if found is None:
                raise InvalidParameterError(f"No {' or '.join(kinds)} model is served here; see GET /v1/models.", "model")
            return found
        card = await self.named(name)
        if card.kind not in kinds:
            raise InvalidParameterError(f"The model {name!r} does not serve this route; see GET /v1/models.", "model")
        return card

    def describe(self, card: ModelCard) -> Model:
        """A model as GET /v1/models shows it."""
        shown = Model(
            id=card.id, created=self.started_at, kind="tts" if card.is_tts else card.kind, max_length=card.max_length
        )
        if card.kind == "embedding":
            shown.dimension = card.dimension
        return shown
