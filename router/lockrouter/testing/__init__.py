"""Real servers for tests, demos and benchmarks: programs that need no installation, clusters that are thrown away."""
