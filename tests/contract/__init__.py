"""Contract tests: each internal of vLLM that we rely on has a test whose failure names it."""
