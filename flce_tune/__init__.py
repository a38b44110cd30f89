"""Fused linear cross-entropy, tuned."""
