"""Capacity: KV memory from a model's shape, workers from an SLA and a measured profile."""
