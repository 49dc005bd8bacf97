"""Announces this node to the swarm: its layers, load and speed. Decides when a change is announced."""
