"""The worker replica: one engine, its loop, and its end of the links."""
