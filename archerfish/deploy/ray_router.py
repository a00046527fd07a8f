"""Ray Serve's choice of a replica for calls through a handle: the policy of our front ends, in the process of the
caller.

handle = serve.get_deployment_handle("engines", "archerfish-engines").options(stream=True)
async for part in handle.generate.remote({"prompt": "Once", "params": {"max_tokens": 16}, "stream": True}): ...
"""

from __future__ import annotations

import logging
import random
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from archerfish.deploy.discovery import Follower, FoundReplica
from archerfish.deploy.secrets import ServiceSecrets, cluster_token
from archerfish.route.router import Route, Router
from archerfish.sequence import Namespace, pack_tokens
from archerfish.serve.catalog import Catalog
from archerfish.serve.overload import estimate_tokens
from archerfish.serve.routing import RoutedBackend
from archerfish.serve.wire import GenerationRequest
from archerfish.text.chat_template import texts_in

logger = logging.getLogger("archerfish.serve")
MAX_ROUTES = 10_000  # of requests that Ray has not sent yet


class CacheAwareRouter(RequestRouter):  # type: ignore[misc]  # ray is not installed where types are checked
    """Ranks replicas by their expected first token, from the same reports that front ends get.

    A text is turned into tokens where the model's files are on this machine; elsewhere only the loads count.
    """

    def initialize_state(self, service: str = "") -> None:
        """service: [deploy] name."""
        secrets = ServiceSecrets.derive(cluster_token(), service)
        self._policy = Router(secrets.routing_secret.encode())
        backend = RoutedBackend(self._policy, credentials=secrets.front_end_pass)
        self._catalog = Catalog(backend, secrets.front_end_pass)
        self._follower = Follower(backend, (secrets.public_key, secrets.secret_key), self._catalog.expire)
        self._chosen: dict[str, Route] = {}
        self._sent: dict[str, Route] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._follower.update(
            [msgspec.convert(one.routing_stats, FoundReplica) for one in replicas if one.routing_stats]
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        left = {one.replica_id.unique_id: one for one in random.sample(candidate_replicas, len(candidate_replicas))}
        ranks: list[list[RunningReplica]] = []
        try:
            route = None if pending_request is None else await self._route(pending_request)
            if route is not None and pending_request is not None:
                names = [route.replica.name, *(name for name, _, _ in route.others)]
                ranks = [[left.pop(name)] for name in names if name in left]
                self._chosen[pending_request.metadata.internal_request_id] = route
                if len(self._chosen) > MAX_ROUTES:
                    self._chosen.pop(next(iter(self._chosen)))
        except Exception:  # Ray would only log it, and the request would wait for ever
            logger.exception("No replica could be chosen by its cache")
        return [*ranks, [*left.values()]] if left else ranks

    async def _route(self, pending: PendingRequest) -> Route | None:
        fields = next((one for one in (*pending.args, *pending.kwargs.values()) if isinstance(one, dict)), {})
        request = msgspec.convert({**fields, "request_id": ""}, GenerationRequest)
        card = await self._catalog.find(request.model or None, "generation")
        tokens, given = (
            request.token_ids or [],
            request.prompt if request.prompt is not None else request.messages or "",
        )
        if not tokens:
            try:
                tokens = await (await self._catalog.text_of(card)).encode(given, "prompt", request.template_options)
            except Exception:  # the files are missing, or the replica will refuse the request
                logger.debug("The tokens of a request for %s are not known here", card.id, exc_info=True)
        estimate, namespace = estimate_tokens(sum(map(len, texts_in(given)))), Namespace(request.tenant)
        return self._policy.choose(card.id, pack_tokens(tokens), namespace, num_tokens=estimate, explains=True)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        key = pending_request.metadata.internal_request_id
        route = self._chosen.pop(key, None)
        if route is not None and route.replica.name == replica_id.unique_id:
            self._policy.sent(route)
            self._sent[key] = route

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        route = self._sent.pop(internal_request_id, None)
        if route is not None:
            self._policy.ended(route)
