"""`python -m archerfish.deploy.front`: a front end on a node of a cluster.

It is a child of a `FrontEnds` actor, from which it learns of replicas: each line of its standard input lists all that
run. Requests go straight to the replicas, over encrypted sockets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec
from starlette.applications import Starlette

from archerfish.deploy.discovery import Follower, FoundReplica
from archerfish.serve.front import main
from archerfish.serve.processes import FrontConfig


def follow(app: Starlette, config: FrontConfig) -> Callable[[bytes], None]:
    """What takes the lines. Both run in the event loop."""
    follower = Follower(app.state.catalog.backend, config.own_keys, app.state.catalog.expire)
    return lambda line: follower.update(msgspec.json.decode(line, type=list[FoundReplica]))


if __name__ == "__main__":
    sys.exit(main(follow))
