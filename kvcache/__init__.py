"""KV blocks: their identity, the slab that holds them, leases on them, and who knows of them."""
