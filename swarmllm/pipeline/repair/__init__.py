"""What happens when a pipeline breaks: retry, failover, rebuilding of stages, and blame."""
