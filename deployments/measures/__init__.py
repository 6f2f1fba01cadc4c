"""The metrics: what each is called, what it means, and how it reaches Ray's exporter."""
