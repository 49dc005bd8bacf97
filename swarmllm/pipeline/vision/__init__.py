"""Pictures on a node that has the encoder: the asked one, or another."""
