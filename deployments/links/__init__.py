"""Messages between ingresses and workers: framing, both ends, where they listen."""
