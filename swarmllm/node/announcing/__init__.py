"""Announces this node to the swarm: what it holds, its load and its speed, and when a change is told."""
