"""Compares serving set-ups under one load: interleaved, on equal cores, with the doubts said."""
