"""Encodes pictures on a node that has the encoder: this node, or another one."""
