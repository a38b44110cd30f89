"""How much of a job's events has come from a worker that has no access to the database."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("received", sa.Integer(), nullable=False, server_default="0"))
