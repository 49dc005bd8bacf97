"""One request's way through the swarm: which stages it takes, and the walk of its jobs through them.

The cores do no I/O and know no clock: `assembly` (who is alive -> stages), `job` and `processor` (the state
machine), `origin` (what the origin makes of what comes back). Around them a thin trio driver: `walker` (the
actions of the states), `session` (one request on one node), `chain` (the origin's side of a pipeline),
`generation` (what the client reads) and `pipelines` (all requests of this node).
"""

from __future__ import annotations

from swarmllm.pipeline.origin.generation import Prompt

__all__ = ["Prompt"]
