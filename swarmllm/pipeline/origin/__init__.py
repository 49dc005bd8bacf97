"""The origin's side of a request: attempts, the chain of stages, and what the client reads."""
