"""The load tool: sends a workload to any OpenAI-compatible server, by HTTP alone, and measures."""
