"""Routes of other servers for encoders: those of text-embeddings-inference (TEI) and of vLLM.

TEI: /embed, /embed_sparse, /embed_all, /rerank, /predict and /info. A POST to / is one to /embed, as huggingface_hub's
clients send it. /rerank takes the bodies of Jina and Cohere too. vLLM: /score, /v1/score, /pooling, /classify and
/v1/classify.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import UNSET, UnsetType
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from archerfish import __version__
from archerfish.engine.token_vectors import SparseVector
from archerfish.errors import InvalidInputError
from archerfish.serve import answers, bodies, vector_routes
from archerfish.serve.bodies import STRING, STRINGS, checked
from archerfish.serve.catalog import ModelCard, read_metadata
from archerfish.serve.errors import InvalidParameterError, Schema, json_response
from archerfish.serve.generation import answer_head
from archerfish.serve.http import BodyRoute
from archerfish.serve.vector_routes import RerankBody, Texts, Truncate, VectorRoutes, best_first, encode_items

# TEI

RIGHT = ("Right", "right")


def read_predict(value: Any, where: str) -> tuple[list[str | tuple[str, str]], bool]:
    """Texts or pairs to classify, and whether they came as a batch: a list of lists. One list of two strings is a
    pair."""
    if isinstance(value, str):
        return [value], False
    items = bodies.check_items(value, where, "texts")
    is_batch = isinstance(items[0], list)
    found: list[str | tuple[str, str]] = []
    for index, item in enumerate(items if is_batch else [items]):
        place = f"{where}[{index}]" if is_batch else where
        texts = [bodies.check_text(text, place) for text in bodies.check_type(item, list, place, "a list of texts")]
        if len(texts) not in (1, 2):
            raise InvalidInputError(
                f"{place} must have one text or two, not {len(texts)}; several texts are lists in a list."
            )
        found.append(texts[0] if len(texts) == 1 else (texts[0], texts[1]))
    return found, is_batch


class TEIBody(bodies.EncoderBody):
    """What all of TEI's bodies have."""

    unsupported: ClassVar[bodies.Values] = {"truncation_direction": RIGHT}

    truncate: Truncate = True


class TEIEmbedBody(TEIBody):
    """POST /embed, in TEI's form."""

    inputs: bodies.Prompts
    normalize: bool | None = True
    prompt_name: str | None = None
    dimensions: int | None = Field(None, ge=1)


class TEISparseBody(TEIBody):
    """POST /embed_sparse and /embed_all, in TEI's form."""

    inputs: bodies.Prompts
    prompt_name: str | None = None


class TEIPredictBody(TEIBody):
    """POST /predict, in TEI's form."""

    inputs: Annotated[
        tuple[list[str | tuple[str, str]], bool],
        checked(read_predict, {"anyOf": [STRING, STRINGS, {"type": "array", "items": STRINGS, "minItems": 1}]}),
    ]
    raw_scores: bool | None = Field(None, description="true: no softmax over several labels.")


class AnyRerankBody(RerankBody):
    """POST /rerank: `documents` for the form of Jina and Cohere, `texts` for TEI's."""

    unsupported: ClassVar[bodies.Values] = {
        **RerankBody.unsupported,
        "truncation_direction": RIGHT,
        "raw_scores": (False,),
    }

    documents: vector_routes.Documents = Field([])
    texts: bodies.StringList | None = Field(None, min_length=1)
    return_text: bool = Field(False, description="Repeat each text in the answer to `texts`.")


class TEIRank(Schema):
    index: int
    score: float
    text: str | UnsetType = UNSET


class TEILabel(Schema):
    score: float
    label: str


class SparseValue(Schema):
    """A token of the vocabulary, and its weight in a text."""

    index: int
    value: float


class TEIInfo(Schema, kw_only=True):
    model_id: str
    model_sha: str | None = None
    model_dtype: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool = True
    tokenization_workers: int = 1
    version: str = __version__


class TEIRoutes:
    """TEI's routes over the vector routes."""

    def __init__(self, vectors: VectorRoutes) -> None:
        self.vectors, self.config = vectors, vectors.config
        self.routes = [
            BodyRoute("/embed", self.embed, TEIEmbedBody, list[list[float]]),
            BodyRoute("/", self.embed, TEIEmbedBody, list[list[float]]),
            BodyRoute("/embed_sparse", self.embed_sparse, TEISparseBody, list[list[SparseValue]]),
            BodyRoute("/embed_all", self.embed_all, TEISparseBody, list[list[list[float]]]),
            BodyRoute("/rerank", self.rerank, AnyRerankBody, answers.Ranking | list[TEIRank]),
            BodyRoute("/predict", self.predict, TEIPredictBody, list[TEILabel | list[TEILabel]]),
            Route("/info", self.info),
        ]

    async def embed(self, request: Request, body: TEIEmbedBody) -> Response:
        """Vectors of texts, as a list of lists."""
        _, rows, _ = await self.vectors.vectors(
            request,
            body.model,
            body.inputs,
            dimensions=body.dimensions,
            prompt_name=body.prompt_name,
            normalize=body.normalize is not False,
            truncate=body.truncate,
            param="inputs",
        )
        return json_response(await encode_items(row.tolist() for row in rows))

    async def embed_sparse(self, request: Request, body: TEISparseBody) -> Response:
        """Sparse vectors of texts: tokens of the vocabulary and their weights."""
        return await self._token_vectors(request, body, "sparse")

    async def embed_all(self, request: Request, body: TEISparseBody) -> Response:
        """Several vectors for each text, one for each of its tokens, of a late-interaction model."""
        return await self._token_vectors(request, body, "multi_vector")

    async def _token_vectors(self, request: Request, body: TEISparseBody, output: str) -> Response:
        options: dict[str, Any] = {"prompt_name": body.prompt_name, "truncate": body.truncate}
        _, found, _ = await self.vectors.token_vectors(request, body.model, body.inputs, output, "inputs", **options)
        return json_response(await encode_items(map(shown_tokens, found)))

    async def rerank(self, request: Request, body: AnyRerankBody) -> Response:
        """Documents by their relevance to a query, best first."""
        if bool(body.documents) == bool(body.texts):
            raise InvalidParameterError("Give either documents, or in TEI's form texts.", "documents")
        if body.texts is None:
            return await self.vectors.rerank(request, body)
        pairs = [(body.query, text) for text in body.texts]
        options = {"deadline_s": body.deadline_s, "truncate": body.truncate}
        _, scores, _ = await self.vectors.scores(request, body.model, pairs, "texts", **options)
        ranks = [TEIRank(place, float(scores[place])) for place in best_first(scores)]
        if body.return_text:
            for rank in ranks:
                rank.text = body.texts[rank.index]
        return json_response(ranks)

    async def predict(self, request: Request, body: TEIPredictBody) -> Response:
        """The scores of a cross-encoder's labels for texts or pairs, best first."""
        texts, is_batch = body.inputs
        card, rows, _ = await self.vectors.classes(
            request, body.model, texts, "inputs", is_raw=bool(body.raw_scores), truncate=body.truncate
        )
        labels = labels_of(card, rows.shape[1])
        shown = [[TEILabel(float(row[place]), labels[place]) for place in best_first(row)] for row in rows]
        return json_response(shown if is_batch else shown[0])

    async def info(self, request: Request) -> Response:
        """The first embedding model, or else the first cross-encoder."""
        card = await self.vectors.catalog.find(None, "embedding", "cross-encoder")
        metadata = read_metadata(card.directory)
        if card.kind == "embedding":
            pooling = (metadata.get("embedding") or {}).get("pooling_mode") or "mean"
            kind: dict[str, dict[str, Any]] = {"embedding": {"pooling": str(pooling)}}
        else:
            names = (metadata.get("config") or {}).get("id2label") or {}
            kind = {"reranker": {"id2label": names, "label2id": {name: int(place) for place, name in names.items()}}}
        return json_response(
            TEIInfo(
                model_id=card.id,
                model_dtype=str(metadata.get("dtype") or ""),
                model_type=kind,
                max_concurrent_requests=self.config.max_queue_texts,
                max_input_length=card.max_length,
                max_batch_tokens=card.max_length,
                max_client_batch_size=self.config.max_texts_per_request,
            )
        )


# vLLM


class ScoreBody(bodies.EncoderBody):
    """POST /score: one text with each of several, or as many texts as there are others."""

    text_1: Texts
    text_2: Texts


class ClassifyBody(bodies.EncoderBody):
    """POST /classify."""

    input: Texts
    use_activation: bool | None = Field(None, description="false: the model's own scores, such as rewards.")


class PoolingBody(vector_routes.EmbeddingsBody):
    """POST /pooling."""

    task: Literal["embed", "token_embed", "sparse"] | None = Field(
        None,
        description="One vector for each text, one for each token, or weights of tokens; left out: what the model is for.",
    )


class Scored(Schema, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class Pooled(Schema, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float] | SparseValue] | str


class Classified(Schema):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class VectorList(answers.GeneratedAnswer, kw_only=True):
    object: Literal["list"] = "list"
    usage: answers.VectorUsage


class Scores(VectorList, kw_only=True):
    data: list[Scored]


class Pooling(VectorList, kw_only=True):
    data: list[Pooled]


class Classes(VectorList, kw_only=True):
    data: list[Classified]


OUTPUTS = {"embed": "dense", "token_embed": "multi_vector", "sparse": "sparse"}  # by the name of a task


def shown_tokens(found: SparseVector | vector_routes.Array) -> list[Any]:
    if not isinstance(found, SparseVector):
        return list(found.tolist())
    return [SparseValue(token_id, weight) for token_id, weight in found.as_dict().items()]


def labels_of(card: ModelCard, number: int) -> list[str]:
    """The names of a model's labels."""
    names = (read_metadata(card.directory).get("config") or {}).get("id2label") or {}
    return [str(names.get(str(place), f"LABEL_{place}")) for place in range(number)]


class VLLMRoutes:
    """vLLM's routes over the vector routes."""

    def __init__(self, vectors: VectorRoutes) -> None:
        self.vectors = vectors
        self.routes = [
            BodyRoute("/score", self.score, ScoreBody, Scores),
            BodyRoute("/v1/score", self.score, ScoreBody, Scores),
            BodyRoute("/pooling", self.pooling, PoolingBody, Pooling),
            BodyRoute("/classify", self.classify, ClassifyBody, Classes),
            BodyRoute("/v1/classify", self.classify, ClassifyBody, Classes),
        ]

    async def score(self, request: Request, body: ScoreBody) -> Response:
        """How well texts fit each other: a cross-encoder's score where one is served, else the cosine."""
        left, right = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
        if len(left) not in (1, len(right)):
            message = (
                f"text_1 has {len(left)} texts and text_2 has {len(right)}; it must have one, or as many as text_2."
            )
            raise InvalidParameterError(message, "text_1")
        pairs = list(zip(left * (len(right) if len(left) == 1 else 1), right, strict=True))
        card, scores, usage = await self.vectors.scores(request, body.model, pairs, "text_2")
        data = [Scored(index=index, score=float(score)) for index, score in enumerate(scores)]
        return json_response(Scores(**answer_head("score", card.id), data=data, usage=usage))

    async def pooling(self, request: Request, body: PoolingBody) -> Response:
        """Vectors of texts, of tokens, or weights of tokens."""
        card = await self.vectors.catalog.find(body.model, "embedding", request=request)
        output = OUTPUTS[body.task] if body.task else card.outputs[0]
        if output == "dense":
            card, rows, usage = await self.vectors.of_body(request, body)
            shown: Any = enumerate(vector_routes.shown_rows(rows, body.encoding_format, body.output_dtype))
        else:
            for option in ("dimensions", "encoding_format", "output_dtype"):
                if getattr(body, option) != type(body).model_fields[option].default:
                    message = (
                        f"{option} is for one vector a text; {card.id} gives {output.replace('_', '-')} vectors here."
                    )
                    raise InvalidParameterError(message, option)
            name = body.prompt_name
            if name is None and body.input_type:
                name = vector_routes.find_prompt(request, card, body.input_type)
            card, found, usage = await self.vectors.token_vectors(
                request,
                body.model,
                body.input,
                output,
                prompt_name=name,
                truncate=body.truncate,
                deadline_s=body.deadline_s,
            )
            shown = enumerate(map(shown_tokens, found))
        data: Any = await encode_items(Pooled(index=index, data=row) for index, row in shown)
        return json_response(Pooling(**answer_head("pool", card.id), data=data, usage=usage))

    async def classify(self, request: Request, body: ClassifyBody) -> Response:
        """The label of each text, with the probabilities of all labels."""
        texts, is_raw = [body.input] if isinstance(body.input, str) else body.input, body.use_activation is False
        card, rows, usage = await self.vectors.classes(
            request, body.model, texts, "input", is_raw=is_raw, is_final=is_raw
        )
        labels = labels_of(card, rows.shape[1])
        data = [
            Classified(index, labels[int(np.argmax(row))], row.tolist(), len(labels)) for index, row in enumerate(rows)
        ]
        return json_response(Classes(**answer_head("classify", card.id), data=data, usage=usage))
