"""`loragate tenants`, `keys`, `limits`, `plans` and `audit`."""

import click

from gateway.tenants.admin.audit_commands import audit_group
from gateway.tenants.admin.key_commands import keys_group
from gateway.tenants.admin.limit_commands import limits_group, plans_group
from gateway.tenants.admin.tenant_commands import tenants_group

commands: list[click.Command] = [
    tenants_group,
    keys_group,
    limits_group,
    plans_group,
    audit_group,
]
