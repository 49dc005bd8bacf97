"""How handlers reach the node they serve."""

from __future__ import annotations

from typing import cast

from quart import current_app

from swarmllm.config import Config
from swarmllm.node import Node

NODE = "swarmllm.node"
SETTINGS = "swarmllm.config"


def current_node() -> Node:
    return cast(Node, current_app.extensions[NODE])


def current_config() -> Config:
    return cast(Config, current_app.extensions[SETTINGS])
