"""Checks of what other nodes computed: drawn at random, computed again, charged to whoever was wrong."""
