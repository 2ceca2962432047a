"""A name has numbered versions, and aliases for them. Adapters that are there become version 1 of
their name, which the name goes on to mean.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

EACH_BECOMES_VERSION_1 = (
    "INSERT INTO named_versions (adapter_id, number, version_digest, created_at)"
    " SELECT id, 1, version_digest, created_at FROM adapters",
    "UPDATE adapters SET last_number = 1",
)


def upgrade() -> None:
    op.add_column(
        "adapters", sa.Column("last_number", sa.Integer, nullable=False, server_default="0")
    )
    op.create_table(
        "named_versions",
        sa.Column("adapter_id", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("version_digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "number", name="pk_named_versions"),
        sa.UniqueConstraint(
            "adapter_id", "version_digest", name="uq_named_versions_adapter_id_version_digest"
        ),
        sa.ForeignKeyConstraint(
            ["adapter_id"],
            ["adapters.id"],
            name="fk_named_versions_adapter_id_adapters",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["version_digest"],
            ["adapter_versions.digest"],
            name="fk_named_versions_version_digest_adapter_versions",
        ),
    )
    op.create_index("ix_named_versions_version_digest", "named_versions", ["version_digest"])
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("newer_number", sa.Integer),
        sa.Column("newer_percent", sa.Integer, nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "name", name="pk_adapter_aliases"),
        sa.ForeignKeyConstraint(
            ["adapter_id"],
            ["adapters.id"],
            name="fk_adapter_aliases_adapter_id_adapters",
            ondelete="CASCADE",
        ),
        *(
            sa.ForeignKeyConstraint(
                ["adapter_id", column],
                ["named_versions.adapter_id", "named_versions.number"],
                name=f"fk_adapter_aliases_{column}_named_versions",
                ondelete="CASCADE",
            )
            for column in ("number", "newer_number")
        ),
    )
    op.create_index(
        "ix_usage_entries_tenant_id_adapter_digest_started_at",
        "usage_entries",
        ["tenant_id", "adapter_digest", "started_at"],
    )
    for statement in EACH_BECOMES_VERSION_1:
        op.execute(statement)


def downgrade() -> None:
    """Versions but the latest of a name are out of reach then; their files stay until they are
    uploaded again or the store is cleared."""
    op.drop_index(
        "ix_usage_entries_tenant_id_adapter_digest_started_at", table_name="usage_entries"
    )
    op.drop_table("adapter_aliases")
    op.drop_index("ix_named_versions_version_digest", table_name="named_versions")
    op.drop_table("named_versions")
    with op.batch_alter_table("adapters") as adapters:
        adapters.drop_column("last_number")
