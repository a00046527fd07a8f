"""Routes of vLLM for scores, vectors and labels: /score, /v1/score, /pooling and /classify."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from archerfish.serve import answers
from archerfish.serve.bodies import STRING, STRINGS, Body, checked
from archerfish.serve.catalog import ModelCard, read_metadata
from archerfish.serve.errors import InvalidParameterError, Schema, json_response
from archerfish.serve.generation import answer_head
from archerfish.serve.http import BodyRoute
from archerfish.serve.vector_routes import EmbeddingsBody, VectorRoutes, encode_items, read_source, shown_rows

Texts = Annotated[str | list[str], checked(read_source, {"anyOf": [STRING, STRINGS]})]


class ScoreBody(Body):
    """POST /score: one text with each of several, or as many texts as there are others."""

    text_1: Texts
    text_2: Texts
    model: str | None = None


class ClassifyBody(Body):
    """POST /classify."""

    input: Texts
    model: str | None = None


class Scored(Schema, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class Pooled(Schema, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str


class Classified(Schema):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class VectorList(Schema, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: answers.VectorUsage


class Scores(VectorList, kw_only=True):
    data: list[Scored]


class Pooling(VectorList, kw_only=True):
    data: list[Pooled]


class Classes(VectorList, kw_only=True):
    data: list[Classified]


def labels_of(card: ModelCard, number: int) -> list[str]:
    """The names of a model's labels."""
    names = (read_metadata(card.directory).get("config") or {}).get("id2label") or {}
    return [str(names.get(str(place), f"LABEL_{place}")) for place in range(number)]


class VLLMRoutes:
    """vLLM's routes over the vector routes."""

    def __init__(self, vectors: VectorRoutes) -> None:
        self.vectors = vectors
        self.routes = [
            BodyRoute("/score", self.score, ScoreBody, Scores), BodyRoute("/v1/score", self.score, ScoreBody, Scores),
            BodyRoute("/pooling", self.pooling, EmbeddingsBody, Pooling),
            BodyRoute("/classify", self.classify, ClassifyBody, Classes),
        ]  # fmt: skip

    async def score(self, request: Request, body: ScoreBody) -> Response:
        """How well texts fit each other: a cross-encoder's score where one is served, else the cosine."""
        left, right = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
        if len(left) not in (1, len(right)):
            message = f"text_1 has {len(left)} texts and text_2 has {len(right)}; it must have one, or as many as text_2."
            raise InvalidParameterError(message, "text_1")
        pairs = list(zip(left * (len(right) if len(left) == 1 else 1), right, strict=True))
        card, scores, usage = await self.vectors.scores(request, body.model, pairs, "text_2")
        data = [Scored(index=index, score=float(score)) for index, score in enumerate(scores)]
        return json_response(Scores(**answer_head("score", card.id), data=data, usage=usage))

    async def pooling(self, request: Request, body: EmbeddingsBody) -> Response:
        """Vectors of texts."""
        card, rows, usage = await self.vectors.of_body(request, body)
        shown = enumerate(shown_rows(rows, body.encoding_format))
        data: Any = await encode_items(Pooled(index=index, data=row) for index, row in shown)
        return json_response(Pooling(**answer_head("pool", card.id), data=data, usage=usage))

    async def classify(self, request: Request, body: ClassifyBody) -> Response:
        """The label of each text, with the probabilities of all labels."""
        texts = [body.input] if isinstance(body.input, str) else body.input
        card, rows, usage = await self.vectors.classes(request, body.model, texts, "input")
        labels = labels_of(card, rows.shape[1])
        data = [Classified(index, labels[int(np.argmax(row))], row.tolist(), len(labels)) for index, row in enumerate(rows)]
        return json_response(Classes(**answer_head("classify", card.id), data=data, usage=usage))
