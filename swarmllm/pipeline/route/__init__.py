"""Chooses the nodes for the layers of a request, and measures what the choice uses."""
