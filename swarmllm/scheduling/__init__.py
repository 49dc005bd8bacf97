"""Decisions as pure functions: what is known comes in, a choice comes out.

No clock, no randomness, no network: the same state gives the same answer on every node, and a test can hand
in any state it likes. Who can run which layers of one request is in `route`, who does it in least time in
`cheapest`, why in `plan`; who should hold which layers in `placement`.
"""
