"""Adapters and their versions.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_versions",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("rank_max", sa.Integer, nullable=False),
        sa.Column("targets", sa.JSON, nullable=False),
        sa.Column("base_digest", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(255), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_adapter_versions"),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version_digest", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_adapters_tenant_id_tenants"
        ),
        sa.ForeignKeyConstraint(
            ["version_digest"],
            ["adapter_versions.digest"],
            name="fk_adapters_version_digest_adapter_versions",
        ),
    )
    op.create_index("ix_adapters_version_digest", "adapters", ["version_digest"])


def downgrade() -> None:
    op.drop_index("ix_adapters_version_digest", table_name="adapters")
    op.drop_table("adapters")
    op.drop_table("adapter_versions")
