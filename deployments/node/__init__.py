"""What a node has once: its agent, the cores it gave away, the directory that follows it."""
