"""The models that a backend serves: their names, their tokenizers and templates, and how a request is addressed to
one."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from archerfish.background import Lazy
from archerfish.engine.request_maker import check_prompt_bytes, read_token_ids
from archerfish.engine.tts import VOCAB_SIZE
from archerfish.errors import InvalidInputError, NotFoundError, UnsupportedModelError
from archerfish.serve.answers import Model
from archerfish.serve.bodies import MAX_TOKEN_ID
from archerfish.serve.client import Backend, RemoteError
from archerfish.serve.errors import InvalidParameterError, naming
from archerfish.serve.overload import estimate_tokens
from archerfish.serve.tenants import ANONYMOUS, Tenant
from archerfish.serve.wire import (
    ChangeAdapter,
    Charge,
    Configure,
    ExplainRequest,
    Kind,
    Query,
    Report,
    names_of,
    unserved_model,
)
from archerfish.text.chat_template import ChatTemplate, texts_in
from archerfish.text.reasoning import has_reasoning
from archerfish.text.text_tokenizer import find_text_tokenizer
from archerfish.text.tokenizer import Tokenizer

T = TypeVar("T")
Prompt = str | Sequence[dict[str, Any]]  # a text, or the messages of a conversation
REFRESH_S = 1.0  # an unknown name makes the catalog ask for the models again, but not more often than this
LONG_TEXT = 4096  # characters or tokens: work on more than this leaves the event loop
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
MISFIT = "invalid_adapter"  # the code of the error for an adapter that does not fit a model


class ContextLengthError(InvalidInputError):
    """A prompt that leaves no room for an answer."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_length: int, *, at_least: bool = False) -> None:
        found = f"at least {num_tokens:,}" if at_least else f"{num_tokens:,}"
        limit = f"This model's maximum context length is {max_length:,} tokens, answer included"
        super().__init__(f"{limit}; the prompt has {found}.", hint="Shorten it.")


class AdapterCard(msgspec.Struct, frozen=True):
    """What the engine process says of a LoRA adapter."""

    name: str
    path: str
    digest: str


class ModelCard(msgspec.Struct, frozen=True):
    """What the engine process says of a model."""

    id: str
    kind: Kind
    max_length: int
    dimension: int = 0
    directory: str = ""
    aliases: tuple[str, ...] = ()
    vocab_size: int = 0
    max_prompt_bytes: int = 0  # 0: no limit
    max_sequence: int = 0  # as max_length, and as its memory holds; 0: max_length
    is_tts: bool = False  # it generates tokens of speech and no text
    served_names: tuple[str, ...] = ()  # aliases that are listed
    default_sampling: dict[str, Any] = {}  # of requests that state none
    outputs: tuple[str, ...] = ("dense",)  # kinds of vectors, that which it is made for first
    adapters: tuple[AdapterCard, ...] | None = None  # of the model; None: it takes none
    finds_adapters: bool = False  # unknown names may be adapters
    parent: str = ""  # of an adapter: the model
    adapter: AdapterCard | None = None

    def with_adapter(self, adapter: AdapterCard) -> ModelCard:
        """The model with an adapter, under the adapter's name."""
        changes: dict[str, Any] = {"aliases": (), "served_names": (), "adapters": None}
        return msgspec.structs.replace(self, id=adapter.name, parent=self.id, adapter=adapter, **changes)


class ModelText:
    """The tokenizer and the chat template of one model. Making it reads files."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.tokenizer = tokenizer = (
            find_text_tokenizer(card.directory, num_ids=card.vocab_size or None, max_len=card.max_length)
            if card.directory
            else None
        )
        self.template = Lazy(lambda: ChatTemplate.find(card.directory, card.id, tokenizer))
        self._longest_token = 1  # in characters
        self._tokens: dict[int, tuple[str, list[int]]] = {}
        if tokenizer is not None:
            _ = tokenizer.special_tokens, tokenizer.decoder_kinds  # computed now and kept, not later in the event loop
            self._longest_token = max(len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.vocab_size))

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            hint = " TTS tokens of a text: POST /v1/tts/tokens." if self.card.vocab_size >= VOCAB_SIZE else ""
            raise InvalidParameterError(
                f"{self.card.id} has no tokenizer: it takes and gives token ids alone.{hint}", param
            )
        return self.tokenizer

    async def encode(
        self,
        prompt: Prompt,
        param: str,
        options: Mapping[str, Any] | None = None,
        answer_start: str = "",
        *,
        add_special_tokens: bool | None = None,
        num_kept: int | None = None,
        is_answered: bool = False,
    ) -> list[int]:
        """Token ids of a text, or of a conversation with the start of the answer.

        options: tools and other values for the chat template. add_special_tokens: None: before a text, and not before a
        conversation, whose template writes them. num_kept: keep only so many, the last. is_answered: refuse a prompt
        that leaves no room for an answer.
        """
        tokenizer = self.tokenizer or self.need_tokenizer(param)
        given = options or {}

        def encode() -> list[int]:
            if self.card.max_prompt_bytes:
                check_prompt_bytes(texts_in([prompt, answer_start, *given.values()]), self.card.max_prompt_bytes)
            if is_answered and num_kept is None:
                contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
                num_tokens = -(-sum(map(len, contents)) // self._longest_token)
                if num_tokens >= self.card.max_length:
                    raise ContextLengthError(num_tokens, self.card.max_length, at_least=True)
            if isinstance(prompt, str):
                return tokenizer.encode(prompt, add_special_tokens is not False)
            try:
                template = self.template.get()
            except UnsupportedModelError:
                message = (
                    f"{self.card.id} has no chat template: it completes texts; give /v1/completions a prompt instead."
                )
                raise InvalidParameterError(message, "model") from None
            token_ids = template.encode(tokenizer, prompt, **given)
            before = tokenizer.encode("") if add_special_tokens else []
            return before + token_ids + (tokenizer.encode(answer_start, False, plain=True) if answer_start else [])

        is_ready = isinstance(prompt, str) or bool(self.template.made)
        with naming(param):
            token_ids = await in_thread(encode, prompt_size(prompt, given) if is_ready else LONG_TEXT + 1)
            token_ids = token_ids if num_kept is None else token_ids[-num_kept:]
            if is_answered:
                self.check_length(token_ids)
        return token_ids

    @cached_property
    def has_reasoning(self) -> bool:
        return self.tokenizer is not None and has_reasoning(self.tokenizer, self.template.get())

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse token ids outside of the vocabulary."""
        read_token_ids(token_ids, self.card.vocab_size or MAX_TOKEN_ID)

    def check_length(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidInputError("The prompt is empty; give at least one token.")
        if len(token_ids) >= self.card.max_length:
            raise ContextLengthError(len(token_ids), self.card.max_length)

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


@cache
def read_metadata(directory: str) -> dict[str, Any]:
    """What the store wrote about a converted model, or nothing."""
    with suppress(OSError, ValueError):
        found = json.loads((Path(directory) / "metadata.json").read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def prompt_size(prompt: Prompt, options: Mapping[str, Any]) -> int:
    """Roughly how much work it is to render and tokenise a prompt, in characters."""
    return sum(map(len, texts_in([prompt, *options.values()]))) + 1000 * len(options.get("tools") or ())


async def in_thread(work: Callable[[], T], size: int) -> T:
    """Run large work in a thread and small work at once."""
    return work() if size <= LONG_TEXT else await asyncio.to_thread(work)


class Catalog:
    """The models of a backend, asked for when they are first needed."""

    def __init__(
        self,
        backend: Backend,
        credentials: str = "",
        *,
        accepts_any: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """credentials: the password of this front end, which allows it to name the tenant of a request.

        accepts_any: an unknown name means the model that a request without a name would mean.
        """
        self.backend = backend
        self.credentials = credentials
        self.accepts_any = accepts_any
        self.started_at = int(time.time())
        self._clock = clock
        self._cards: list[ModelCard] = []
        self._by_name: dict[str, ModelCard] = {}
        self._texts: dict[str, ModelText] = {}  # by the ids of models
        self._opening = asyncio.Lock()
        self._asked_at = float("-inf")
        self._ids = itertools.count()

    def address(self, request: Request, card: ModelCard) -> dict[str, Any]:
        """The members of a message that name a request, its model and its tenant."""
        tenant = request.state.tenant
        request.state.log["model"] = card.id
        adapter = card.adapter
        named = {} if adapter is None else {"adapter": adapter.name, "adapter_digest": adapter.digest}
        return {
            "request_id": f"r{next(self._ids)}",
            "model": card.parent or card.id,
            "credentials": self.credentials,
            "tenant": "" if tenant is ANONYMOUS else tenant.name,
            **named,
        }

    async def cards(self) -> list[ModelCard]:
        return self._cards or await self._refresh()

    def expire(self) -> None:
        """The engine processes have changed: the models are asked for again when they are needed."""
        self._cards = []

    def expire_adapters(self) -> None:
        """Another front end may have changed adapters."""
        if any(card.adapters is not None for card in self._cards):
            self.expire()

    def compare_content(self, known: str, used: str) -> None:
        """An answer has come. If its adapter had another content than the one that is known here, the models are asked
        for."""
        if known != used:
            self.expire()

    async def report(self, message: ChangeAdapter | Charge | Configure | ExplainRequest | Query) -> dict[str, Any]:
        """The values of the engine process's answer to a message, which is sent with the credentials of this front
        end."""
        message.credentials = self.credentials
        answer = await self.backend.ask(message)
        assert isinstance(answer, Report)
        return answer.values

    async def _refresh(self) -> list[ModelCard]:
        found = await self.report(Query(request_id="", about="models"))
        self._cards = msgspec.convert(found["models"], list[ModelCard])
        self._by_name = {
            one.name: card.with_adapter(one) for card in reversed(self._cards) for one in reversed(card.adapters or ())
        }
        self._by_name |= {name: card for card in reversed(self._cards) for name in names_of(card.id, card.aliases)}
        self._by_name |= {
            card.id: card for card in self._cards
        }  # a full name wins over the short name of another model
        self._asked_at = self._clock()
        return self._cards

    async def find(self, name: str | None, *kinds: Kind, request: Request | None = None) -> ModelCard:
        """The model of a name, of one of these kinds if any are given. Without a name: the first model of the first
        kind.

        request: that of a tenant, who finds no adapters but those that it may use. If the server is told so, another
        model than the named one answers it, if kinds are given; it gets a remark then.
        """
        cards = self._cards or await self._refresh()
        if name is None:
            found = next((card for kind in kinds for card in cards if card.kind == kind), None)
            if found is None:
                raise InvalidParameterError(
                    f"No {' or '.join(kinds)} model is served here; see GET /v1/models.", "model"
                )
            return found
        if name.removesuffix(":latest") not in self._by_name and self._clock() - self._asked_at >= REFRESH_S:
            cards = await self._refresh()
        card = self._by_name.get(name) or self._by_name.get(
            name.removesuffix(":latest")
        )  # as Ollama's clients write names
        tenant: Tenant | None = None if request is None else request.state.tenant
        plain = name.removesuffix(":latest")
        if card is None and (tenant is None or tenant.may_use(plain)):
            card = await self._find_adapter(plain)
        if card is not None and tenant is not None and card.adapter is not None and not tenant.may_use(card.id):
            card = None  # it looks as if it were not here
        if card is None and self.accepts_any and kinds and request is not None:
            card = await self.find(None, *kinds)
            request.state.remarks.append(f"the model {name[:200]!r} is not served here: {card.id} answers")
        if card is None:
            names = [one for card in cards for one in (card.id, *card.served_names)]
            names += [
                one.name for card in cards for one in card.adapters or () if tenant is None or tenant.may_use(one.name)
            ]
            raise unserved_model(name, names)
        if kinds and card.kind not in kinds:
            raise InvalidParameterError(f"The model {name!r} does not serve this route; see GET /v1/models.", "model")
        return card

    async def _find_adapter(self, name: str) -> ModelCard | None:
        """An adapter that lies in the directory of a model's adapters, which is loaded for the first model that it
        fits."""
        refused: RemoteError | None = None
        for card in self._cards:
            if card.finds_adapters:
                try:
                    await self.report(ChangeAdapter(request_id="", model=card.id, name=name))
                except RemoteError as error:
                    if error.code not in (NotFoundError.code, MISFIT):
                        raise
                    refused = refused or (error if error.code == MISFIT else None)
                    continue
                await self._refresh()
                return self._by_name.get(name)
        if refused is not None:
            raise refused
        return None

    async def is_model(self, name: str) -> bool:
        """Whether a name is one of a model, and not of an adapter."""
        plain = name.removesuffix(":latest")
        return any(plain in names_of(card.id, card.aliases) for card in await self.cards())

    async def find_text(self, name: str | None, *kinds: Kind, request: Request | None = None) -> ModelText:
        card = await self.find(name, *kinds, request=request)
        found = self._texts.get(card.id) if card.adapter is None else None
        return found if found is not None and found.card == card else await self.text_of(card)

    async def text_of(self, card: ModelCard) -> ModelText:
        if card.adapter is not None:
            text = copy(await self.find_text(card.parent))
            text.card = card
            return text
        async with self._opening:
            found = self._texts.get(card.id)
            if found is None or found.card != card:
                found = self._texts[card.id] = await asyncio.to_thread(ModelText, card)
        return found

    def describe(self, card: ModelCard) -> Model:
        """A model as GET /v1/models shows it."""
        shown = Model(
            id=card.id, created=self.started_at, kind="tts" if card.is_tts else card.kind, max_length=card.max_length
        )
        if card.kind == "embedding":
            shown.dimension = card.dimension
        elif card.kind == "generation" and not card.is_tts:
            shown.default_sampling = card.default_sampling
        if card.adapter is not None:
            shown.root, shown.parent = card.adapter.path, card.parent
        return shown

    async def listed(self, tenant: Tenant = ANONYMOUS) -> list[Model]:
        """All models by all their public names, with the adapters that a tenant may use."""
        found: list[Model] = []
        for card in await self.cards():
            shown = self.describe(card)
            found += [shown, *(msgspec.structs.replace(shown, id=name, root=card.id) for name in card.served_names)]
            adapters = (one for one in card.adapters or () if tenant.may_use(one.name))
            found += [self.describe(card.with_adapter(one)) for one in adapters]
        return found

    # Work of a front end without a model counts against the limits of tenants too.

    async def charge(self, request: Request, num_tokens: int, *, is_spent: bool = False) -> int:
        """Take a request and its tokens from the limits of the caller, or raise RemoteError. Returns the tokens taken.

        is_spent: only correct an earlier charge by these tokens. Callers without limits cost no message.
        """
        tenant: Tenant = request.state.tenant
        limit = tenant.tokens_per_minute if is_spent else tenant.requests_per_minute or tenant.tokens_per_minute
        if not limit or (is_spent and not num_tokens):
            return 0
        await self.report(Charge(request_id="", num_tokens=num_tokens, is_spent=is_spent, tenant=tenant.name))
        return num_tokens

    async def encode_charged(
        self,
        request: Request,
        text: ModelText,
        prompt: Prompt,
        param: str,
        options: Mapping[str, Any] | None = None,
        answer_start: str = "",
        **others: Any,
    ) -> list[int]:
        """`ModelText.encode`, whose tokens count against the limits of the caller."""
        taken = await self.charge(request, estimate_tokens(prompt_size(prompt, options or {})))
        token_ids = await text.encode(prompt, param, options, answer_start, **others)
        await self.charge(request, len(token_ids) - taken, is_spent=True)
        return token_ids
