"""The op inside other libraries."""
