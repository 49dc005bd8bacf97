"""Checks of what other nodes computed: drawn at random, computed again, charged to the node that was
wrong."""
