"""The ingress replica: vLLM's application, the flow's shell, and what is known of the workers."""
