"""What whoever uploads may store, and which names are theirs to use."""

from msgspec import Struct

from gateway.errors import PermissionDenied


class Allowance(Struct, frozen=True):
    adapters_max: int
    bytes_max: int | None = None
    """Of all the tenant's adapters together; None: no limit."""
    names: frozenset[str] | None = None
    """None: any."""

    def check_name(self, name: str) -> None:
        """Raises PermissionDenied."""
        if self.names is not None and name not in self.names:
            raise PermissionDenied(
                f"This API key is for certain adapters, and {name!r} is none of them. Use a key "
                "that was created without `allowed_adapters`, or with this one among them."
            )
