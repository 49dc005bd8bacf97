"""The stage's side of a request: admission, sessions, the walk of jobs, and links between workers."""
