"""Runs the jobs of a service on a machine without access to its database."""
