"""Places layers of models on this node: the plan, its steps, and shares of other nodes that this node
accepts."""
