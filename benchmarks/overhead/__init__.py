"""What `gateway_overhead` measures: a stub engine, the gateways before it, and a client."""
