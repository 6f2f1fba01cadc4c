"""Deterministic simulation of the control plane: see README.md."""
