"""/v1/embeddings, /v1/rerank and /similarity; for Cohere's clients /v1/embed, /v2/embed and /v2/rerank."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, field
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from archerfish.config import ServeConfig
from archerfish.engine.token_vectors import SparseVector, document_prompt, from_rows, scores_of
from archerfish.errors import InputTooLargeError, InvalidInputError
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve import answers, bodies
from archerfish.serve.bodies import STRING, STRINGS, UNUSED, EncoderBody, Values, check_items, check_text, checked
from archerfish.serve.catalog import Catalog, ModelCard, read_metadata
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import InvalidParameterError, Schema, encode_json, json_response, short_value
from archerfish.serve.generation import new_id
from archerfish.serve.http import BodyRoute
from archerfish.serve.wire import ClassifyRequest, EmbedRequest, ForVectors, Kind, Vectors

Array = npt.NDArray[np.float32]
NumberType = Literal["float", "int8", "uint8", "binary", "ubinary"]
YIELD_ROWS = 16  # rows that are written as JSON before other requests run: a few milliseconds
DOCUMENT = {"anyOf": [STRING, {"type": "object", "properties": {"text": STRING}, "required": ["text"]}]}
OF_QUERIES, OF_DOCUMENTS = ("query", "search_query"), ("document", "passage", "corpus", "search_document")
# Names that prompts for a type of text have in models' files.
PROMPTS = {
    **dict.fromkeys(("query", "search_query"), OF_QUERIES),
    **dict.fromkeys(("document", "passage", "search_document"), OF_DOCUMENTS),
}


def read_documents(value: Any, where: str) -> list[str]:
    """Texts; each may be an object that holds one."""
    texts: list[str] = []
    for index, item in enumerate(check_items(value, where, "documents")):
        has_member = isinstance(item, dict) and "text" in item
        texts.append(
            check_text(item["text"] if has_member else item, f"{where}[{index}]{'.text' if has_member else ''}")
        )
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


Truncate = Annotated[
    bool,
    checked(read_truncate, {"enum": [True, False, "END", "NONE", None]}),
    Field(description="false or NONE: refuse texts that are longer than the model takes."),
]
Texts = Annotated[str | list[str], checked(read_source, {"anyOf": [STRING, STRINGS]})]
Documents = Annotated[list[str], checked(read_documents, {"type": "array", "minItems": 1, "items": DOCUMENT})]


class VectorBody(EncoderBody):
    """What the bodies of these routes have in common."""

    deadline_s: float | None = Field(
        None, gt=0, description="Seconds in which the answer is needed; a request that would be late is refused."
    )
    truncate: Truncate = True


class EmbeddingsBody(VectorBody):
    """POST /v1/embeddings, in OpenAI's form."""

    unsupported: ClassVar[Values] = {"truncate_prompt_tokens": (-1,)}  # -1: the model's length

    input: bodies.Prompts
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian float32.")
    dimensions: int | None = Field(
        None, ge=1, description="Keep only the first so many dimensions, scaled to length 1."
    )
    prompt_name: str | None = Field(None, description="A prompt of the model's files, which is put before every text.")
    input_type: str | None = Field(
        None, description="What the texts are, as query or document; chooses the model's prompt."
    )
    output_dtype: NumberType = Field(
        "float", description="Numbers of the vectors; int8 and uint8: scaled for each vector."
    )
    user: str | None = Field(None, description=UNUSED)


class RerankBody(VectorBody):
    """POST /v1/rerank, in the common form of Jina and Cohere."""

    unsupported: ClassVar[Values] = {
        "rank_fields": ([], ["text"]),
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "truncate_prompt_tokens": (-1,),
    }

    query: str
    documents: Documents
    top_n: int | None = Field(None, ge=1, description="Give only the best so many; left out: all.")
    return_documents: bool = Field(False, description="Repeat the text of each document in the answer.")


class SimilarityBody(VectorBody):
    """POST /similarity: the cosine of one source with each sentence, or of each of several sources."""

    source: Texts
    sentences: bodies.StringList = Field(min_length=1)


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
        card, rows, usage = await self.of_body(request, body)
        cut, shown = set(request.state.truncated), enumerate(shown_rows(rows, body.encoding_format, body.output_dtype))
        items = (answers.Embedding(index=index, embedding=row, truncated=index in cut or UNSET) for index, row in shown)
        data: Any = await encode_items(items)
        return json_response(answers.Embeddings(data=data, model=card.id, usage=usage))

    async def rerank(self, request: Request, body: RerankBody) -> Response:
        """Documents by their relevance to a query, best first: by a cross-encoder where one is served, else by
        cosine."""
        pairs = [(body.query, document) for document in body.documents]
        options = {"deadline_s": body.deadline_s, "truncate": body.truncate}
        card, scores, usage = await self.scores(request, body.model, pairs, "documents", **options)
        results = [answers.Ranked(index=i, relevance_score=float(scores[i])) for i in best_first(scores)[: body.top_n]]
        if body.return_documents:
            for result in results:
                result.document = answers.DocumentText(text=body.documents[result.index])
        return json_response(answers.Ranking(model=card.id, results=results, usage=usage))

    async def similarity(self, request: Request, body: SimilarityBody) -> Response:
        """Cosines: a list for one source, a list per source for several."""
        is_single = isinstance(body.source, str)
        sources = [body.source] if isinstance(body.source, str) else body.source
        texts = [*sources, *body.sentences]
        card = await self.find(request, body.model, len(texts), "sentences", "embedding")
        options = {"normalize": True, "deadline_s": body.deadline_s, "truncate": body.truncate}
        rows, usage = await self.ask(request, card, EmbedRequest, len(texts), texts=texts, **options)
        cosines = rows[: len(sources)] @ rows[len(sources) :].T
        shown: Any = cosines[0].tolist() if is_single else await encode_items(row.tolist() for row in cosines)
        return json_response(answers.Similarities(similarities=shown, model=card.id, usage=usage))

    async def of_body(self, request: Request, body: EmbeddingsBody) -> tuple[ModelCard, Array, answers.VectorUsage]:
        return await self.vectors(
            request,
            body.model,
            body.input,
            dimensions=body.dimensions,
            prompt_name=body.prompt_name,
            input_type=body.input_type,
            deadline_s=body.deadline_s,
            truncate=body.truncate,
        )

    async def vectors(
        self,
        request: Request,
        model: str | None,
        texts: Sequence[str | list[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        input_type: str | None = None,
        normalize: bool = True,
        param: str = "input",
        **options: Any,
    ) -> tuple[ModelCard, Array, answers.VectorUsage]:
        """The vectors of texts. param: the route's name for the texts. options: other fields of EmbedRequest."""
        card = await self.find(request, model, len(texts), param, "embedding")
        if dimensions is not None and dimensions > card.dimension:
            raise InvalidParameterError(f"{card.id} has {card.dimension} dimensions, not {dimensions}.", "dimensions")
        if prompt_name is None and input_type is not None:
            prompt_name = find_prompt(request, card, input_type)
        try:
            options |= {"texts": texts, "prompt_name": prompt_name, "normalize": normalize}
            rows, usage = await self.ask(request, card, EmbedRequest, len(texts), **options)
        except RemoteError as error:
            if error.code in (InvalidInputError.code, InputTooLargeError.code):
                error.param = error.param or param
            raise
        if dimensions is not None and dimensions < card.dimension:
            if not is_matryoshka(card):
                request.state.remarks.append(f"{card.id} does not say that it was trained for fewer dimensions")
            rows = rows[:, :dimensions]
            if normalize:
                norms = np.linalg.norm(rows, axis=1, keepdims=True)
                rows = np.asarray(rows / np.maximum(norms, np.finfo(np.float32).tiny), np.float32)
        return card, rows, usage

    async def token_vectors(
        self,
        request: Request,
        model: str | None,
        texts: Sequence[str | list[int]],
        output: str = "",
        param: str = "input",
        **options: Any,
    ) -> tuple[ModelCard, list[SparseVector | Array], answers.VectorUsage]:
        """Sparse vectors of texts, or several for each. output: as in EmbedRequest; empty: what the model is made
        for."""
        card = await self.find(request, model, len(texts), param, "embedding")
        output = output or card.outputs[0]
        if output not in card.outputs or output == "dense":
            raise InvalidParameterError(
                f"{card.id} has {' and '.join(card.outputs)} vectors, not {output} ones.", "model"
            )
        rows, usage = await self.ask(request, card, EmbedRequest, len(texts), texts=texts, output=output, **options)
        parts = np.split(rows, np.cumsum(request.state.row_counts)[:-1])
        return card, [from_rows(part, output) for part in parts], usage

    async def scores(
        self, request: Request, model: str | None, pairs: Sequence[tuple[str, str]], param: str, **options: Any
    ) -> tuple[ModelCard, Array, answers.VectorUsage]:
        """How well the second text of each pair fits the first: a cross-encoder's score, or a cosine.

        options: deadline_s and truncate of the request to the engine.
        """
        card = await self.find(request, model, len(pairs), param, "cross-encoder", "embedding")
        if card.outputs[0] != "dense":
            places = {text: place for place, text in enumerate(dict.fromkeys(text for text, _ in pairs))}
            _, left, first = await self.token_vectors(request, model, list(places), prompt_name="query", **options)
            stated = embedding_of(card)
            name, how = document_prompt(stated.get("prompts") or {}), stated.get("similarity_fn_name")
            _, right, usage = await self.token_vectors(
                request, model, [b for _, b in pairs], prompt_name=name, **options
            )
            found = [scores_of([left[places[a]]], [b], how)[0] for (a, _), b in zip(pairs, right, strict=True)]
            scores, num_tokens = np.concatenate(found), first.prompt_tokens + usage.prompt_tokens
            usage = answers.VectorUsage(num_tokens, num_tokens, truncated=first.truncated or usage.truncated)
        elif card.kind == "cross-encoder":
            rows, usage = await self.ask(request, card, ClassifyRequest, len(pairs), texts=pairs, **options)
            if rows.shape[1] != 1:
                message = (
                    f"{card.id} gives {rows.shape[1]} labels per pair; a score needs one. POST /classify gives all."
                )
                raise InvalidParameterError(message, "model")
            scores = rows[:, 0]
        else:
            places = {text: place for place, text in enumerate(dict.fromkeys(pair[0] for pair in pairs))}
            texts = [*places, *(pair[1] for pair in pairs)]
            rows, usage = await self.ask(
                request, card, EmbedRequest, len(pairs), texts=texts, normalize=True, **options
            )
            scores = np.einsum("ij,ij->i", rows[[places[pair[0]] for pair in pairs]], rows[len(places) :])
        return card, scores, usage

    async def classes(
        self,
        request: Request,
        model: str | None,
        texts: Sequence[str | tuple[str, str]],
        param: str,
        *,
        is_raw: bool = False,
        is_final: bool = False,
        truncate: bool = True,
    ) -> tuple[ModelCard, Array, answers.VectorUsage]:
        """The probability of every label, a row for each text or pair; is_raw: the model's own scores of several
        labels;
        is_final: of one label, too."""
        try:
            card = await self.find(request, model, len(texts), param, "cross-encoder")
        except InvalidParameterError as error:
            error.hint = "Only a cross-encoder has labels and can classify texts; --rerank-model serves one."
            raise
        rows, usage = await self.ask(
            request,
            card,
            ClassifyRequest,
            len(texts),
            texts=texts,
            truncate=truncate,
            as_probabilities=not is_raw,
            is_raw=is_final,
        )
        return card, rows, usage

    async def find(self, request: Request, model: str | None, num_texts: int, param: str, *kinds: Kind) -> ModelCard:
        """The model for a request with so many texts in its parameter `param`."""
        card, most = await self.catalog.find(model, *kinds, request=request), self.config.max_texts_per_request
        if num_texts > most:
            hint = "Send several requests: they share batches."
            raise InputTooLargeError(f"{param} makes {num_texts} texts; a request takes at most {most}.", hint=hint)
        return card

    async def ask(
        self, request: Request, card: ModelCard, kind: Callable[..., ForVectors], num_texts: int, **fields: Any
    ) -> tuple[Array, answers.VectorUsage]:
        """The rows that the backend computes for a message with these fields. num_texts: texts or pairs, as they are
        counted.

        request.state.truncated: places of cut texts.
        """
        answer = await self.catalog.backend.ask(kind(**fields, **self.catalog.address(request, card)))
        assert isinstance(answer, Vectors)
        num_tokens, route = answer.num_tokens, request.scope["path"]
        request.state.log.update(prompt_tokens=num_tokens, output_tokens=0)
        request.state.truncated, request.state.row_counts = answer.truncated, answer.row_counts
        if answer.truncated:
            limit = (
                "" if card.outputs[:1] == ("multi_vector",) else f" to {card.max_length:,} tokens"
            )  # of queries another
            request.state.remarks.append(f"texts cut{limit}: {len(answer.truncated)}")
        self.texts.add(num_texts, route=route)
        self.tokens.add(num_tokens, route=route)
        usage = answers.VectorUsage(num_tokens, num_tokens, truncated=bool(answer.truncated) or UNSET)
        rows = np.frombuffer(answer.data, dtype="<f4").reshape(answer.num_rows, answer.num_columns)
        return rows.astype(np.float32, copy=False), usage


def best_first(scores: Array) -> list[int]:
    """The places of scores in falling order."""
    return [int(place) for place in np.argsort(-scores, kind="stable")]


def shown_rows(rows: Array, encoding_format: str, number_type: NumberType = "float") -> Iterator[list[float] | str]:
    """Rows as lists, or as text for base64."""
    numbers = map(NUMBERS[number_type], rows)
    return map(as_base64, numbers) if encoding_format == "base64" else (row.tolist() for row in numbers)


def as_base64(numbers: npt.NDArray[Any]) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def to_int8(row: Array) -> npt.NDArray[Any]:
    """Whole numbers whose largest one is 127: the cosines of vectors stay about the same."""
    largest = float(np.abs(row).max()) or 1.0
    return np.round(row * (127 / largest)).astype(np.int8)


NUMBERS: dict[NumberType, Callable[[Array], npt.NDArray[Any]]] = {
    "float": lambda row: row.astype("<f4"),
    "int8": to_int8,
    "uint8": lambda row: (to_int8(row).astype(np.int16) + 128).astype(np.uint8),
    "binary": lambda row: (np.packbits(row > 0).astype(np.int16) - 128).astype(np.int8),
    "ubinary": lambda row: np.packbits(row > 0),
}


def embedding_of(card: ModelCard) -> dict[str, Any]:
    """How a model's files say that it embeds texts."""
    return read_metadata(card.directory).get("embedding") or {}


def find_prompt(request: Request, card: ModelCard, input_type: str) -> str | None:
    """The name of the model's prompt for texts of a type. If there is none, a remark says so."""
    own = dict.fromkeys(("query", "document"), "") if card.outputs[:1] == ("multi_vector",) else {}
    prompts = own | (embedding_of(card).get("prompts") or {})
    found = next((name for name in (input_type, *PROMPTS.get(input_type, ())) if name in prompts), None)
    if found is None:
        request.state.remarks.append(f"{card.id} has no prompt for input_type {input_type[:40]!r}")
    return found


def is_matryoshka(card: ModelCard) -> bool:
    """Whether a model's files say that the first components of its vectors can be used by themselves."""
    config = read_metadata(card.directory).get("config") or {}
    return bool(config.get("is_matryoshka") or config.get("matryoshka_dimensions"))


async def encode_items(items: Iterable[Any]) -> list[msgspec.Raw]:
    """The items of a long list as JSON, written without holding up the event loop."""
    encoded: list[msgspec.Raw] = []
    for item in items:
        encoded.append(msgspec.Raw(encode_json(item)))
        if len(encoded) % YIELD_ROWS == 0:
            await asyncio.sleep(0)
    return encoded


# Cohere

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


def shown_as(rows: Array, kind: EmbeddingType) -> Iterator[list[float] | str]:
    return shown_rows(rows, "base64") if kind == "base64" else shown_rows(rows, "float", kind)


class CohereEmbedBody(EncoderBody):
    """POST /v1/embed and /v2/embed, in Cohere's form."""

    unsupported: ClassVar[Values] = {"images": ([],), "inputs": ([],), "max_tokens": ()}

    texts: bodies.StringList = Field(min_length=1)
    input_type: str | None = Field(None, description="search_query and search_document choose the model's prompt.")
    embedding_types: Annotated[list[EmbeddingType], Field(fail_fast=True)] | None = Field(
        None, description="int8 and uint8: scaled for each vector."
    )
    output_dimension: int | None = Field(None, ge=1)
    truncate: Truncate = True
    priority: int | None = Field(None, description=UNUSED)


class CohereUnits(Schema):
    input_tokens: int


class CohereMeta(Schema, kw_only=True):
    api_version: dict[str, str]
    billed_units: CohereUnits


class CohereFloats(Schema, kw_only=True, tag_field="response_type", tag="embeddings_floats"):
    id: str = field(default_factory=lambda: new_id("emb"))
    embeddings: list[list[float]]
    texts: list[str]
    meta: CohereMeta


class CohereByType(Schema, kw_only=True, tag_field="response_type", tag="embeddings_by_type"):
    id: str = field(default_factory=lambda: new_id("emb"))
    embeddings: dict[str, list[list[float] | str]]
    texts: list[str]
    meta: CohereMeta


class CohereRoutes:
    """Cohere's routes over the vector routes."""

    def __init__(self, vectors: VectorRoutes) -> None:
        self.vectors = vectors
        self.routes = [
            BodyRoute("/v1/embed", self.embed, CohereEmbedBody, CohereFloats | CohereByType),
            BodyRoute("/v2/embed", self.embed, CohereEmbedBody, CohereByType),
            BodyRoute("/v2/rerank", vectors.rerank, RerankBody, answers.Ranking),
        ]

    async def embed(self, request: Request, body: CohereEmbedBody) -> Response:
        """Vectors of texts, in one or several types of numbers."""
        _, rows, usage = await self.vectors.vectors(
            request,
            body.model,
            body.texts,
            dimensions=body.output_dimension,
            input_type=body.input_type,
            truncate=body.truncate,
            param="texts",
        )
        version = request.scope["path"][2]
        meta = CohereMeta(api_version={"version": version}, billed_units=CohereUnits(usage.prompt_tokens))
        types = body.embedding_types or ["float"]
        shown: Any = {kind: await encode_items(shown_as(rows, kind)) for kind in dict.fromkeys(types)}
        if version == "1" and body.embedding_types is None:
            return json_response(CohereFloats(embeddings=shown["float"], texts=body.texts, meta=meta))
        return json_response(CohereByType(embeddings=shown, texts=body.texts, meta=meta))
