"""The admin API: tenants, their keys, limits, plans, and the audit trail."""

from gateway.tenants.admin import audit_routes, key_routes, limit_routes, tenant_routes

handlers = [tenant_routes.router, key_routes.router, limit_routes.router, audit_routes.router]
