"""One request's way through the swarm: which stages it takes, and the walk of its jobs through them.

`pipelines` has all requests of this node. `route` chooses the stages of a request, `origin` is the side of
the node that was asked, `stage` the side of a node that runs layers, `repair` replaces stages that broke, and
`check` computes samples again. `job` and `processor` are the state machine of a walk.

The cores (`route.assembly`, `job`, `processor`, `repair.plan`, `check.verdict`) do no I/O and know no clock;
thin trio drivers run them.
"""

from __future__ import annotations

from swarmllm.pipeline.origin.generation import Prompt

__all__ = ["Prompt"]
