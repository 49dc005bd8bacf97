"""Places layers of models on this node: the plan, its steps, and the shares that it takes part in."""
