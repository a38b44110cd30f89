"""The tuning database: records, models, store, migrations.

Knows SQLAlchemy, no torch. Import it as ``flce_tune.tuning_db``.
"""

if __name__ != "flce_tune.tuning_db":
    raise ImportError("import flce_tune.tuning_db, not tuning_db: its tables would be mapped twice")
