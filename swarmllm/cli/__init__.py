"""The `swarmllm` command.

Everything but `daemon` and `demo` is a client of a running daemon's HTTP endpoint, so that a script, a
person and another program see the same things. Nothing here imports libp2p, trio or the daemon before a
command needs it: `swarmllm --help` is what people run first, and it answers at once.
"""
