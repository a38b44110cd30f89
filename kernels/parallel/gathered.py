"""A data-parallel weight, gathered by name."""

from __future__ import annotations

from torch import Tensor

from flce_tune.kernels.arguments import is_distributed


def gathered_weight(weight: Tensor) -> Tensor:
    """All rows of a weight that is sharded for data parallelism, gathered once.

    For a head of ``fully_shard`` that is used outside its module's forward, where no hook gathers
    it. The gradient is averaged over the ranks and goes back to the shards, as ``fully_shard``
    does it by default. Other tensors come back unchanged.

    Args:
        weight: [V, D], a DTensor or a plain tensor.

    Returns:
        [V, D], plain.
    """
    if not is_distributed(weight):
        return weight
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(weight, DTensor)
    mean = [Partial("avg")] * weight.device_mesh.ndim
    return weight.full_tensor(grad_placements=mean)
