"""Micro benchmarks: parts of ours measured from inside, so these alone may import them."""
