"""GET /v1/cache/view: what a caller may see of a generation model: its memory, its prefixes, its last requests, and
figures."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from archerfish.serve.catalog import Catalog, ModelText, in_thread
from archerfish.serve.errors import Schema, json_response
from archerfish.serve.wire import Query


class BlockView(Schema):
    """The blocks of KV, or states. Runs of one kind follow one another: in the order of memory, or sorted by kind.

    Cached and running blocks are the caller's. Hidden ones are free or those of other tenants; operators get others and
    free.
    """

    total: int
    block_tokens: int
    order: Literal["memory", "kind"]
    runs: list[tuple[Literal["running", "cached", "others", "hidden", "free"], int]]


class NodeView(Schema):
    """A node of the radix tree: tokens `start` to `end` of a cached prefix."""

    parent: int  # its place in the list, before this one; -1: a prefix begins here
    start: int
    end: int
    hits: int  # requests that used it
    locks: int  # running sequences that need it
    num_children: int  # some may not be in the list
    age_s: float  # since its last use
    adapter: str
    text: str  # of its first tokens; empty for a model without a tokenizer


class RequestView(Schema):
    """A request that has ended, and why the cache had as much of its prompt as it had."""

    ended_s_ago: float
    reason: str
    why: str  # in a sentence; empty if it was never admitted
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    finish_reason: str
    draft_tokens: int
    accepted_tokens: int


class EngineView(Schema):
    """One engine process. For operators, and without API keys, figures are those of all requests, else those of the
    caller's.

    Times are of the last minute and null without any; tokens per second are the mean of three seconds.
    """

    replica: str  # empty: there is one
    blocks: BlockView
    nodes: list[NodeView]  # the most recent ones
    num_nodes: int  # of all of the caller's
    requests: list[RequestView]  # the newest first
    num_running: int
    num_waiting: int
    tokens_per_second: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None
    kv_usage: float  # share of the blocks that running sequences hold
    cached_tokens: int  # prompt tokens since the start that came from the cache
    computed_tokens: int  # and those that did not
    acceptance: float | None  # of tokens that were proposed for the listed requests


class CacheView(Schema):
    model: str
    replicas: list[EngineView]


class ViewRoutes:
    """The live view of generation models."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.routes = [Route("/v1/cache/view", self.view)]

    async def view(self, request: Request) -> Response:
        """Memory, cached prefixes, last requests and figures of a model, as far as they are the caller's."""
        text = await self.catalog.find_text(request.query_params.get("model"), "generation", request=request)
        address = self.catalog.address(request, text.card)
        given = {
            name: address[name] for name in ("request_id", "model", "credentials", "tenant")
        }  # a view is no adapter's
        found = await self.catalog.report(Query(about="view", **given))
        views = found.get("replicas", {"": found})

        def answer() -> Response:
            replicas = [self._read(name, view, text) for name, view in views.items()]
            return json_response(CacheView(text.card.id, replicas))

        return await in_thread(answer, sum(len(node["preview"]) for view in views.values() for node in view["nodes"]))

    @staticmethod
    def _read(name: str, view: dict[str, object], text: ModelText) -> EngineView:
        nodes = view["nodes"]
        assert isinstance(nodes, list)
        for node in nodes:
            preview = node.pop("preview")
            node["text"] = text.tokenizer.decode(preview, False) if text.tokenizer is not None else ""
        return msgspec.convert({**view, "replica": name}, EngineView)
