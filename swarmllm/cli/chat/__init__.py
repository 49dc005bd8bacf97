"""`swarmllm chat`: the command, the session in a terminal, the conversation, and the stream it reads."""
