"""Repairs pipelines that broke: retry, failover, probing, and rebuilding of stages."""
