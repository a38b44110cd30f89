"""Triton kernels and their launchers.

``backend`` has the strategies' primitives; ``rows``, ``labels``, ``logits`` and ``product`` the
kernels behind them; ``atomic`` the article's kernel, which is a strategy by itself.
"""
