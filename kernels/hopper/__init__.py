"""Kernels for Hopper GPUs whose work is scheduled by hand, in Gluon, and their launchers.

``schedule`` orders the GEMM x·Wᵀ; ``numerators``, ``gradient`` and ``logits`` are its epilogues,
and compute what Triton kernels of those names do. ``product`` is the gradients' GEMM.
"""
