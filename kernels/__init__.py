"""The op: strategies, Triton kernels, references, configs and their validity.

Knows torch and Triton, no database. Import it as ``flce_tune.kernels``.
"""

if __name__ != "flce_tune.kernels":
    raise ImportError("import flce_tune.kernels, not kernels: a second copy would register twice")
