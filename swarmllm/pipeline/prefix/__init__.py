"""KV of prompts' beginnings from other nodes: whether to fetch it, fetching, giving and checking it."""
