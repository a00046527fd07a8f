"""Cohere's routes for its clients: /v1/embed, /v2/embed and /v2/rerank; /v1/rerank is one of vector_routes.py."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
from msgspec import field
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from archerfish.serve import answers
from archerfish.serve.bodies import UNUSED, Body, Values
from archerfish.serve.errors import Schema, json_response
from archerfish.serve.generation import new_id
from archerfish.serve.http import BodyRoute
from archerfish.serve.vector_routes import Array, RerankBody, Truncate, VectorRoutes, encode_items

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


def to_int8(row: Array) -> Any:
    """Whole numbers whose largest one is 127: the cosines of vectors stay about the same."""
    largest = float(np.abs(row).max()) or 1.0
    return np.round(row * (127 / largest)).astype(np.int8)


ENCODERS: dict[EmbeddingType, Callable[[Array], Any]] = {
    "float": lambda row: row.tolist(),
    "int8": lambda row: to_int8(row).tolist(),
    "uint8": lambda row: (to_int8(row).astype(np.int16) + 128).tolist(),
    "binary": lambda row: (np.packbits(row > 0).astype(np.int16) - 128).tolist(),
    "ubinary": lambda row: np.packbits(row > 0).tolist(),
    "base64": lambda row: base64.b64encode(row.astype("<f4").tobytes()).decode(),
}


class CohereEmbedBody(Body):
    """POST /v1/embed and /v2/embed, in Cohere's form."""

    unsupported: ClassVar[Values] = {"images": ([],), "inputs": ([],), "max_tokens": ()}

    texts: list[str] = Field(min_length=1)
    model: str | None = None
    input_type: str | None = Field(None, description="search_query and search_document choose the model's prompt.")
    embedding_types: list[EmbeddingType] | None = Field(None, description="int8 and uint8: scaled for each vector.")
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
            request, body.model, body.texts, dimensions=body.output_dimension, input_type=body.input_type,
            truncate=body.truncate, param="texts",
        )
        version = request.scope["path"][2]
        meta = CohereMeta(api_version={"version": version}, billed_units=CohereUnits(usage.prompt_tokens))
        types = body.embedding_types or ["float"]
        shown: Any = {kind: await encode_items(map(ENCODERS[kind], rows)) for kind in dict.fromkeys(types)}
        if version == "1" and body.embedding_types is None:
            return json_response(CohereFloats(embeddings=shown["float"], texts=body.texts, meta=meta))
        return json_response(CohereByType(embeddings=shown, texts=body.texts, meta=meta))
