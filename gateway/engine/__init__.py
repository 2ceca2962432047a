"""The engine. It knows nothing of HTTP, tenants or databases, and runs alone."""
