"""From generated text to responses in any dialect: reasoning, tool calls, streams, several choices."""
