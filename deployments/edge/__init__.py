"""HTTP, before and after vLLM's own application: the port, tenants, errors, streams' ends."""
