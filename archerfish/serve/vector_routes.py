"""/v1/embeddings, /v1/rerank and /similarity."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from archerfish.config import ServeConfig
from archerfish.errors import InputTooLargeError, InvalidInputError
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve import answers, bodies
from archerfish.serve.bodies import STRING, STRINGS, UNUSED, Body, Values, check_items, check_text, checked
from archerfish.serve.catalog import Catalog, ModelCard
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import InvalidParameterError, encode_json, json_response, short_value
from archerfish.serve.http import BodyRoute, log_tokens
from archerfish.serve.wire import EmbedRequest, ScoreRequest, Vectors

Array = npt.NDArray[np.float32]
YIELD_ROWS = 16  # rows that are written as JSON before other requests run: a few milliseconds
DOCUMENT = {"anyOf": [STRING, {"type": "object", "properties": {"text": STRING}, "required": ["text"]}]}
Deadline = Annotated[
    float | None, Field(gt=0, description="Seconds in which the answer is needed; a request that would be late is refused.")
]


def read_documents(value: Any, where: str) -> list[str]:
    """Texts; each may be an object that holds one."""
    texts: list[str] = []
    for index, item in enumerate(check_items(value, where, "documents")):
        has_member = isinstance(item, dict) and "text" in item
        texts.append(check_text(item["text"] if has_member else item, f"{where}[{index}]{'.text' if has_member else ''}"))
    return texts


def read_truncate(value: Any, where: str) -> bool:
    """true or "END": cut texts that are too long; false or "NONE": refuse them."""
    if not isinstance(value, bool | None) and value not in ("END", "NONE"):
        raise InvalidInputError(f'{where} must be true, false, "END" or "NONE", not {short_value(value)}.')
    return value not in (False, "NONE")


def read_source(value: Any, where: str) -> str | list[str]:
    if isinstance(value, str):
        return value
    return [check_text(item, f"{where}[{index}]") for index, item in enumerate(check_items(value, where, "strings"))]


Truncate = Annotated[bool, checked(read_truncate, {"enum": [True, False, "END", "NONE", None]}),
                     Field(description="false or NONE: refuse texts that are longer than the model takes.")]  # fmt: skip


class EmbeddingsBody(Body):
    """POST /v1/embeddings, in OpenAI's form."""

    unsupported: ClassVar[Values] = {"truncate_prompt_tokens": (-1,)}  # -1: the model's length

    input: Annotated[list[str | list[int]], checked(bodies.check_inputs, bodies.INPUTS)]
    model: str | None = Field(None, description="Name of the served model; left out: the first embedding model.")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian float32.")
    dimensions: int | None = Field(None, ge=1, description="Keep only the first so many dimensions, scaled to length 1.")
    deadline_s: Deadline = None
    truncate: Truncate = True
    user: str | None = Field(None, description=UNUSED)


class RerankBody(Body):
    """POST /v1/rerank, in the common form of Jina and Cohere."""

    unsupported: ClassVar[Values] = {
        "rank_fields": ([], ["text"]), "max_chunks_per_doc": (), "max_tokens_per_doc": (), "truncate_prompt_tokens": (-1,)
    }  # fmt: skip

    query: str
    documents: Annotated[list[str], checked(read_documents, {"type": "array", "minItems": 1, "items": DOCUMENT})]
    model: str | None = None
    top_n: int | None = Field(None, ge=1, description="Give only the best so many; left out: all.")
    return_documents: bool = Field(False, description="Repeat the text of each document in the answer.")
    deadline_s: Deadline = None
    truncate: Truncate = True


class SimilarityBody(Body):
    """POST /similarity: the cosine of one source with each sentence, or of each of several sources."""

    source: Annotated[str | list[str], checked(read_source, {"anyOf": [STRING, STRINGS]})]
    sentences: list[str] = Field(min_length=1)
    model: str | None = None
    deadline_s: Deadline = None
    truncate: Truncate = True


class VectorRoutes:
    """Routes that answer with numbers."""

    def __init__(self, catalog: Catalog, config: ServeConfig, registry: MetricRegistry) -> None:
        self.catalog, self.config = catalog, config
        self.texts = registry.counter("archerfish_texts_total", "Texts or pairs computed.", ("route",))
        self.tokens = registry.counter("archerfish_tokens_total", "Tokens computed.", ("route",))
        self.routes = [
            BodyRoute("/v1/embeddings", self.embeddings, EmbeddingsBody, answers.Embeddings),
            BodyRoute("/v1/rerank", self.rerank, RerankBody, answers.Ranking),
            BodyRoute("/similarity", self.similarity, SimilarityBody, answers.Similarities),
        ]

    async def embeddings(self, request: Request, body: EmbeddingsBody) -> Response:
        """Vectors of texts."""
        card = await self.catalog.find(body.model, "embedding", request=request)
        self.check_number(len(body.input), "input")
        if body.dimensions is not None and body.dimensions > card.dimension:
            raise InvalidParameterError(f"{card.id} has {card.dimension} dimensions, not {body.dimensions}.", "dimensions")
        try:
            rows, num_tokens = await self.embed(request, card, body.input, body.deadline_s, truncate=body.truncate)
        except RemoteError as error:
            if error.code in (InvalidInputError.code, InputTooLargeError.code):
                error.param = error.param or "input"
            raise
        if body.dimensions is not None and body.dimensions < rows.shape[1]:
            rows = rows[:, : body.dimensions]
            norms = np.linalg.norm(rows, axis=1, keepdims=True)
            rows = np.asarray(rows / np.maximum(norms, np.finfo(np.float32).tiny), np.float32)
        shown: Iterable[list[float] | str] = (row.tolist() for row in rows)
        if body.encoding_format == "base64":
            shown = (base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows)
        cut = set(request.state.truncated)
        data: Any = await encode_items(
            answers.Embedding(index=index, embedding=row, truncated=index in cut or UNSET) for index, row in enumerate(shown)
        )
        usage = self.usage(request, len(rows), num_tokens)
        return json_response(answers.Embeddings(data=data, model=card.id, usage=usage))

    async def rerank(self, request: Request, body: RerankBody) -> Response:
        """Documents by their relevance to a query, best first: by a cross-encoder where one is served, else by cosine."""
        card = await self.catalog.find(body.model, "cross-encoder", "embedding", request=request)
        self.check_number(len(body.documents), "documents")
        if card.kind == "cross-encoder":
            address = self.catalog.address(request, card)
            message = ScoreRequest(
                query=body.query, documents=body.documents, deadline_s=body.deadline_s, truncate=body.truncate, **address
            )
            rows, num_tokens = await self.ask(request, message)
            scores = rows[:, 0]
        else:
            rows, num_tokens = await self.embed(
                request, card, [body.query, *body.documents], body.deadline_s, truncate=body.truncate
            )
            scores = rows[1:] @ rows[0]
        order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
        results = [answers.Ranked(index=i, relevance_score=float(scores[i])) for i in order]
        if body.return_documents:
            for result in results:
                result.document = answers.DocumentText(text=body.documents[result.index])
        usage = self.usage(request, len(body.documents), num_tokens)
        return json_response(answers.Ranking(model=card.id, results=results, usage=usage))

    async def similarity(self, request: Request, body: SimilarityBody) -> Response:
        """Cosines: a list for one source, a list per source for several."""
        card = await self.catalog.find(body.model, "embedding", request=request)
        sources = [body.source] if isinstance(body.source, str) else body.source
        num_texts = len(sources) + len(body.sentences)
        self.check_number(num_texts, "sentences")
        rows, num_tokens = await self.embed(
            request, card, [*sources, *body.sentences], body.deadline_s, truncate=body.truncate
        )
        cosines = rows[: len(sources)] @ rows[len(sources) :].T
        is_single = isinstance(body.source, str)
        shown: Any = cosines[0].tolist() if is_single else await encode_items(row.tolist() for row in cosines)
        usage = self.usage(request, num_texts, num_tokens)
        return json_response(answers.Similarities(similarities=shown, model=card.id, usage=usage))

    async def embed(
        self, request: Request, card: ModelCard, texts: Sequence[str | list[int]], deadline_s: float | None, *,
        truncate: bool = True,
    ) -> tuple[Array, int]:
        """Vectors of length 1, and the number of tokens. truncate: cut texts that are too long; false: refuse them."""
        address = self.catalog.address(request, card)
        message = EmbedRequest(texts=list(texts), normalize=True, deadline_s=deadline_s, truncate=truncate, **address)
        return await self.ask(request, message)

    async def ask(self, request: Request, message: EmbedRequest | ScoreRequest) -> tuple[Array, int]:
        """The rows that the backend computes, and the number of tokens. request.state.truncated: places of cut texts."""
        answer = await self.catalog.backend.ask(message)
        assert isinstance(answer, Vectors)
        log_tokens(request, answer.num_tokens)
        request.state.truncated = answer.truncated
        if answer.truncated:
            most = (await self.catalog.find(message.model)).max_length
            request.state.remarks.append(f"texts cut to {most:,} tokens: {len(answer.truncated)}")
        rows = np.frombuffer(answer.data, dtype="<f4").reshape(answer.num_rows, answer.num_columns)
        return rows.astype(np.float32, copy=False), answer.num_tokens

    def check_number(self, number: int, param: str) -> None:
        if number > self.config.max_texts_per_request:
            raise InputTooLargeError(
                f"{param} makes {number} texts; a request takes at most {self.config.max_texts_per_request}.",
                hint="Send several requests: they share batches.",
            )

    def usage(self, request: Request, num_texts: int, num_tokens: int) -> answers.VectorUsage:
        route = request.scope["path"]
        self.texts.add(num_texts, route=route)
        self.tokens.add(num_tokens, route=route)
        truncated = bool(request.state.truncated) or UNSET
        return answers.VectorUsage(prompt_tokens=num_tokens, total_tokens=num_tokens, truncated=truncated)


async def encode_items(items: Iterable[Any]) -> list[msgspec.Raw]:
    """The items of a long list as JSON, written without holding up the event loop."""
    encoded: list[msgspec.Raw] = []
    for item in items:
        encoded.append(msgspec.Raw(encode_json(item)))
        if len(encoded) % YIELD_ROWS == 0:
            await asyncio.sleep(0)
    return encoded
