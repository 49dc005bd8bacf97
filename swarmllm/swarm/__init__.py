"""The swarm: how nodes find each other, tell each other what they hold, and carry bytes to one another.

Only the files that need it import libp2p (it costs half a second and 80 MB): `router`, `records.registry` and
`in_memory` stay light, and importing this package imports nothing.
"""
