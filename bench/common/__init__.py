"""What several benchmarks and tests use: models, swarms, proxies, figures."""
