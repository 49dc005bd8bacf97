"""Who may talk to this node: its own identity, network keys, invitations, allow and deny lists, the gater."""
