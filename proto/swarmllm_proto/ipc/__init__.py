"""Messages between the daemon and a model worker: all of them by one name."""

from swarmllm_proto.ipc.messages import *  # noqa: F403
