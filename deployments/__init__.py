"""Headwater's Serve deployments: ingress, request flow, prefill and decode workers."""
