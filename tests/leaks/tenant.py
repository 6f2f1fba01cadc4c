"""The one tenant whose all requests are: the salt decides what the counting engine answers."""

from __future__ import annotations

from deployments.edge.tenants import Tenant, salted

TENANT = Tenant(bytes(32))
SALT = salted(TENANT, None)
