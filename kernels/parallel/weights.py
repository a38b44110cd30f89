"""DTensor weights: what this rank computes with, and where its gradient goes."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from flce_tune.kernels.parallel.shard import Range

Part = tuple[Tensor, Tensor | None, ProcessGroup | None, Range | None]


def local_part(
    weight: Tensor,  # [V, D] if a DTensor, else this rank's rows
    bias: Tensor | None,  # [V] if a DTensor, else this rank's entries
    group: ProcessGroup | None,
    vocab_range: Range | None,
) -> Part:
    """This rank's rows as plain tensors, the group they are split over, and their classes.

    A DTensor's gradient comes back as a DTensor of the same placement. With ``Replicate()`` there
    is no split: each rank computes with its copy.

    Raises:
        ValueError: a placement or a combination that is not accepted.
    """
    if not isinstance(weight, DTensor):
        return weight, _plain_bias(bias), group, vocab_range
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1:
        raise ValueError(
            f"weight is a DTensor on a mesh of {mesh.ndim} dimensions, placements {placements}: "
            "redistribute it over one of them, for example weight.redistribute(mesh['tp'], "
            "[Shard(0)]), or pass its local rows with process_group and vocab_range"
        )
    if vocab_range is not None:
        raise ValueError(f"a DTensor weight knows its vocab_range, got {vocab_range}: leave it out")
    (placement,), mesh_group = placements, mesh.get_group()
    if group is not None and group is not mesh_group:
        raise ValueError(
            "weight is a DTensor of another group than process_group: leave process_group out"
        )
    if isinstance(placement, Replicate):
        if group is not None:
            raise ValueError(
                "weight is Replicate() over process_group, which is no split: leave process_group "
                "out, or redistribute weight to [Shard(0)]"
            )
        return weight.to_local(), _local_bias(bias, placements), None, None
    if type(placement) is not Shard or placement.dim != 0:
        raise ValueError(
            f"weight's placement is {placement}, accepted are Shard(0) and Replicate(): "
            "weight.redistribute(placements=[Shard(0)]) splits the classes, weight.full_tensor() "
            "gathers them"
        )
    local = weight.to_local()
    start = _offset(weight)
    return local, _local_bias(bias, placements), mesh_group, (start, start + len(local))


def _offset(weight: DTensor) -> int:
    """First row of this rank's shard: the ranks before it hold one chunk each."""
    ranks, rank = weight.device_mesh.size(), weight.device_mesh.get_local_rank()
    chunk = -(-weight.shape[0] // ranks)
    return min(rank * chunk, weight.shape[0])


def _local_bias(bias: Tensor | None, placements: tuple[object, ...]) -> Tensor | None:
    if not isinstance(bias, DTensor):
        return bias
    if tuple(bias.placements) != placements:
        raise ValueError(f"bias must have weight's placement {placements}, got {bias.placements}")
    return bias.to_local()


def _plain_bias(bias: Tensor | None) -> Tensor | None:
    if isinstance(bias, DTensor):
        raise ValueError("bias is a DTensor and weight is not: pass both alike")
    return bias
