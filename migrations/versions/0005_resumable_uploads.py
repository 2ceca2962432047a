"""Resumable uploads and their parts.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_uploads",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("idempotency_key", sa.String(255), nullable=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("failure", sa.String(2000), nullable=False),
        sa.Column("version_digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_uploads"),
        sa.UniqueConstraint(
            "tenant_id", "idempotency_key", name="uq_adapter_uploads_tenant_id_idempotency_key"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_adapter_uploads_tenant_id_tenants"
        ),
    )
    op.create_index("ix_adapter_uploads_expires_at", "adapter_uploads", ["expires_at"])
    op.create_table(
        "adapter_upload_parts",
        sa.Column("upload_id", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("upload_id", "number", name="pk_adapter_upload_parts"),
        sa.ForeignKeyConstraint(
            ["upload_id"],
            ["adapter_uploads.id"],
            name="fk_adapter_upload_parts_upload_id_adapter_uploads",
        ),
    )


def downgrade() -> None:
    op.drop_table("adapter_upload_parts")
    op.drop_index("ix_adapter_uploads_expires_at", table_name="adapter_uploads")
    op.drop_table("adapter_uploads")
