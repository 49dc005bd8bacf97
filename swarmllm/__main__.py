"""`python -m swarmllm` is the `swarmllm` command."""

from __future__ import annotations

from swarmllm.cli.main import main

if __name__ == "__main__":
    main()
