"""How many workers each role has: a pure policy, and its seam to Ray Serve's autoscaler."""
