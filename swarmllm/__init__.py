"""The SwarmLLM daemon: requests become jobs, jobs walk pipelines of layer ranges across a swarm of nodes."""

from __future__ import annotations

__version__ = "0.1.0"
