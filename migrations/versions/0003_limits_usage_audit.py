"""Plans and limits, prices, usage, budgets, and the audit trail.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "request_tokens_max",
    "adapters_max",
    "adapter_bytes_max",
)


def moment(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def append_only(dialect: str) -> list[str]:
    """Triggers that let rows be added to the audit trail, and never changed or removed."""
    if dialect == "postgresql":
        return [
            "CREATE FUNCTION audit_entries_refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'audit entries are never changed or removed'; END $$",
            "CREATE TRIGGER audit_entries_rows BEFORE UPDATE OR DELETE ON audit_entries "
            "FOR EACH ROW EXECUTE FUNCTION audit_entries_refuse()",
            "CREATE TRIGGER audit_entries_all BEFORE TRUNCATE ON audit_entries "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_entries_refuse()",
        ]
    return [
        f"CREATE TRIGGER audit_entries_{event.lower()} BEFORE {event} ON audit_entries "
        "BEGIN SELECT RAISE(ABORT, 'audit entries are never changed or removed'); END"
        for event in ("UPDATE", "DELETE")
    ]


def upgrade() -> None:
    op.add_column("tenants", sa.Column("plan", sa.String(63), nullable=False, server_default=""))
    with op.batch_alter_table("api_keys") as keys:
        keys.alter_column("tenant_id", existing_type=sa.String(36), nullable=True)
        keys.add_column(sa.Column("prefix", sa.String(24), nullable=False, server_default="lg_sk_"))
        keys.add_column(sa.Column("allowed_adapters", sa.JSON))
        keys.add_column(sa.Column("allowed_networks", sa.JSON))
        keys.add_column(sa.Column("replaced_by_id", sa.String(36)))
        keys.create_foreign_key(
            "fk_api_keys_replaced_by_id_api_keys",
            "api_keys",
            ["replaced_by_id"],
            ["id"],
            ondelete="SET NULL",
        )
    op.create_table(
        "limits",
        sa.Column("owner", sa.String(80), nullable=False),
        *(sa.Column(name, sa.BigInteger) for name in LIMITS),
        sa.PrimaryKeyConstraint("owner", name="pk_limits"),
    )
    op.create_table(
        "prices",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("tenant_id", sa.String(36)),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("input_micros", sa.BigInteger, nullable=False),
        sa.Column("cached_input_micros", sa.BigInteger, nullable=False),
        sa.Column("output_micros", sa.BigInteger, nullable=False),
        moment("valid_from"),
        sa.PrimaryKeyConstraint("id", name="pk_prices"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_prices_tenant_id_tenants", ondelete="CASCADE"
        ),
    )
    op.create_index(
        "ix_prices_model_tenant_id_valid_from", "prices", ["model", "tenant_id", "valid_from"]
    )
    op.create_table(
        "usage_entries",
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("key_id", sa.String(36), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("adapter_digest", sa.String(64)),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_nanos", sa.BigInteger, nullable=False),
        moment("started_at"),
        sa.Column("first_token_ms", sa.Double),
        sa.Column("duration_ms", sa.Double),
        sa.Column("finish_reason", sa.String(32)),
        sa.PrimaryKeyConstraint("request_id", name="pk_usage_entries"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_usage_entries_tenant_id_tenants"
        ),
    )
    for owner in ("tenant_id", "key_id"):
        op.create_index(
            f"ix_usage_entries_{owner}_started_at", "usage_entries", [owner, "started_at"]
        )
    op.create_table(
        "budgets",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("owner", sa.String(80), nullable=False),
        sa.Column("period", sa.String(8), nullable=False),
        sa.Column("amount_nanos", sa.BigInteger, nullable=False),
        sa.Column("hard", sa.Boolean, nullable=False),
        sa.Column("alert_percents", sa.JSON, nullable=False),
        sa.Column("webhook_url", sa.String(2000), nullable=False),
        moment("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_budgets"),
        sa.UniqueConstraint(
            "tenant_id", "owner", "period", name="uq_budgets_tenant_id_owner_period"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_budgets_tenant_id_tenants", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "budget_alerts",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("budget_id", sa.String(36), nullable=False),
        moment("period_start"),
        sa.Column("percent", sa.Integer, nullable=False),
        sa.Column("spent_nanos", sa.BigInteger, nullable=False),
        moment("created_at"),
        sa.Column("tries", sa.Integer, nullable=False),
        moment("next_try_at", nullable=True),
        moment("sent_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_budget_alerts"),
        sa.UniqueConstraint(
            "budget_id",
            "period_start",
            "percent",
            name="uq_budget_alerts_budget_id_period_start_percent",
        ),
        sa.ForeignKeyConstraint(
            ["budget_id"],
            ["budgets.id"],
            name="fk_budget_alerts_budget_id_budgets",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_budget_alerts_next_try_at", "budget_alerts", ["next_try_at"])
    op.create_table(
        "audit_entries",
        sa.Column("sequence", sa.BigInteger, nullable=False, autoincrement=False),
        moment("at"),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("action", sa.String(63), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("tenant_id", sa.String(36)),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_audit_entries"),
    )
    op.create_index(
        "ix_audit_entries_tenant_id_sequence", "audit_entries", ["tenant_id", "sequence"]
    )
    head = op.create_table(
        "audit_head",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_head"),
    )
    op.bulk_insert(head, [{"id": 1, "sequence": 0, "hash": ""}])
    for statement in append_only(op.get_context().dialect.name):
        op.execute(statement)


def downgrade() -> None:
    for table in (
        "audit_head",
        "audit_entries",
        "budget_alerts",
        "budgets",
        "usage_entries",
        "prices",
        "limits",
    ):
        op.drop_table(table)
    if op.get_context().dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_entries_refuse()")
    op.execute("DELETE FROM api_keys WHERE tenant_id IS NULL")
    with op.batch_alter_table("api_keys") as keys:
        keys.drop_constraint("fk_api_keys_replaced_by_id_api_keys", type_="foreignkey")
        for column in ("replaced_by_id", "allowed_networks", "allowed_adapters", "prefix"):
            keys.drop_column(column)
        keys.alter_column("tenant_id", existing_type=sa.String(36), nullable=False)
    with op.batch_alter_table("tenants") as tenants:
        tenants.drop_column("plan")
