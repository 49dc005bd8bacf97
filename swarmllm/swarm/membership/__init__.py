"""Decides which nodes may talk to this one: its own identity, network keys, invitations, allow and deny
lists, the gater.
"""
