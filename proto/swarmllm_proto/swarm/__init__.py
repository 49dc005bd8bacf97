"""Messages between nodes: all of them by one name, from the modules of this package."""

from swarmllm_proto.swarm.messages import *  # noqa: F403
