"""Which rows of which requests run next, in which batch and which KV sequence."""
