"""Keeps what a node knows of its peers: whether they live, how far they are trusted, where they were."""
