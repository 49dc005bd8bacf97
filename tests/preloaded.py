"""What the server process of `forked_process` imports last."""

from __future__ import annotations

import gc

from tests.url_builders import leave_out_url_builders

leave_out_url_builders()
# What was imported stays. Every fork is spared to look at it when it collects what it has left over.
gc.collect()
gc.freeze()
