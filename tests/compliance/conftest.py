"""Foreign programs against ours: not part of `make test`, because they come from other package registries.
`make compliance` installs and runs them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("SWARMLLM_COMPLIANCE") else ["*"]
