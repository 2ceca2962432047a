"""What a tenant is told when it keeps as much as it may."""

from gateway.errors import RateLimited


def no_room(kept: str, most: str, param: str) -> RateLimited:
    return RateLimited(
        f"This tenant keeps {kept}; it may keep {most}. Delete one with "
        "DELETE /v1/adapters/{name}, or ask the operator for more.",
        param=param,
        code="insufficient_quota",
    )
