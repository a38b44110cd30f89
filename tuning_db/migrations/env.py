"""What Alembic runs: migrations on the connection it is given, or on ``-x url=...``."""

from alembic import context
from sqlalchemy import Connection

from flce_tune.tuning_db.engine import Database
from flce_tune.tuning_db.migrations import VERSION_TABLE
from flce_tune.tuning_db.models import Base


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        transactional_ddl=True,  # true of SQLite, too: we say BEGIN ourselves
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    database = Database(context.get_x_argument(as_dictionary=True)["url"])
    with database.migrating() as opened:
        run(opened)
    database.close()
