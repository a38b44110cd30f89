"""First schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

UTC = sa.DateTime(timezone=True)
BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "device",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("capability", sa.Text(), nullable=False),
        sa.Column("sm_count", sa.Integer(), nullable=False),
        sa.Column("shared_memory_per_block", sa.Integer(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_device")),
        sa.UniqueConstraint(
            "kind",
            "name",
            "capability",
            "sm_count",
            "shared_memory_per_block",
            name=op.f("uq_device_kind"),
        ),
    )
    op.create_table(
        "job",
        sa.Column("number", BIG_ID, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_at", UTC, nullable=False),
        sa.Column("started_at", UTC, nullable=True),
        sa.Column("finished_at", UTC, nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", UTC, nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_job")),
        sa.UniqueConstraint("id", name=op.f("uq_job_id")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_job_idempotency_key")),
    )
    op.create_index(op.f("ix_job_state_priority_number"), "job", ["state", "priority", "number"])
    op.create_table(
        "problem",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("accumulate", sa.Text(), nullable=False),
        sa.Column("hidden", sa.Integer(), nullable=False),
        sa.Column("vocab", sa.Integer(), nullable=False),
        sa.Column("token_bucket", sa.BigInteger(), nullable=False),
        sa.Column("features", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_problem")),
        sa.UniqueConstraint(
            "mode",
            "dtype",
            "accumulate",
            "hidden",
            "vocab",
            "token_bucket",
            "features",
            name=op.f("uq_problem_mode"),
        ),
    )
    op.create_table(
        "toolchain",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("torch", sa.Text(), nullable=False),
        sa.Column("triton", sa.Text(), nullable=False),
        sa.Column("cuda", sa.Text(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("kernel_hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_toolchain")),
        sa.UniqueConstraint(
            "torch", "triton", "cuda", "driver", "kernel_hash", name=op.f("uq_toolchain_torch")
        ),
    )
    op.create_table(
        "job_event",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("created_at", UTC, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_job_event_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_event")),
    )
    op.create_index(op.f("ix_job_event_job_id_id"), "job_event", ["job_id", "id"])
    op.create_table(
        "measurement",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("toolchain_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("samples_ms", sa.JSON(), nullable=False),
        sa.Column("median_ms", sa.Double(), nullable=True),
        sa.Column("spread_ms", sa.Double(), nullable=True),
        sa.Column("workspace_bytes", sa.BigInteger(), nullable=True),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spills", sa.Integer(), nullable=True),
        sa.Column("shared_memory", sa.Integer(), nullable=True),
        sa.Column("errors", sa.JSON(), nullable=False),
        sa.Column("clocks_mhz", sa.Integer(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_at", UTC, nullable=False),
        sa.CheckConstraint(
            "(status = 'ok') = (median_ms IS NOT NULL)", name=op.f("ck_measurement_time_iff_ok")
        ),
        sa.CheckConstraint(
            "median_ms > 0 AND median_ms < 1e300", name=op.f("ck_measurement_time_is_finite")
        ),
        sa.ForeignKeyConstraint(
            ["device_id"], ["device.id"], name=op.f("fk_measurement_device_id")
        ),
        sa.ForeignKeyConstraint(
            ["problem_id"], ["problem.id"], name=op.f("fk_measurement_problem_id")
        ),
        sa.ForeignKeyConstraint(
            ["toolchain_id"], ["toolchain.id"], name=op.f("fk_measurement_toolchain_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_measurement")),
    )
    op.create_index(op.f("ix_measurement_device_id"), "measurement", ["device_id"])
    op.create_index(
        op.f("ix_measurement_problem_id_device_id"), "measurement", ["problem_id", "device_id"]
    )
    op.create_table(
        "miss",
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("last_seen", UTC, nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name=op.f("fk_miss_device_id")),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name=op.f("fk_miss_problem_id")),
        sa.PrimaryKeyConstraint("device_id", "problem_id", name=op.f("pk_miss")),
    )
    op.create_table(
        "winner",
        sa.Column("measurement_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("default_ms", sa.Double(), nullable=True),
        sa.Column("eager_ms", sa.Double(), nullable=True),
        sa.Column("verified", sa.Boolean(), nullable=False),
        sa.Column("updated_at", UTC, nullable=False),
        sa.ForeignKeyConstraint(
            ["measurement_id"], ["measurement.id"], name=op.f("fk_winner_measurement_id")
        ),
        sa.PrimaryKeyConstraint("measurement_id", name=op.f("pk_winner")),
    )
