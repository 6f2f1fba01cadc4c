"""Benchmarks of our own parts from inside; all other load tests speak HTTP."""
