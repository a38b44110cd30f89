"""Who sweeps what."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

UTC = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "sweep_lease",
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("expires_at", UTC, nullable=True),
        sa.Column("finished", sa.Text(), nullable=True),
        sa.Column("finished_at", UTC, nullable=True),
        sa.ForeignKeyConstraint(
            ["device_id"], ["device.id"], name=op.f("fk_sweep_lease_device_id")
        ),
        sa.ForeignKeyConstraint(
            ["problem_id"], ["problem.id"], name=op.f("fk_sweep_lease_problem_id")
        ),
        sa.PrimaryKeyConstraint("device_id", "problem_id", name=op.f("pk_sweep_lease")),
    )
