"""Shares models and files over the swarm: the forecast, the share, and the parts that nodes fetch."""
