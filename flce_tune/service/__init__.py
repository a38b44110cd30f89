"""The service a team shares: jobs, results, snapshots and a dashboard over HTTP."""
