"""What happens when a pipeline breaks: retry, failover, probing, and rebuilding of stages."""
