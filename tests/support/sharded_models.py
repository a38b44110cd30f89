"""Heads as training libraries shard them, each beside the unsharded one; run on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.parallel.gathered import gathered_weight

V, D, N = 23, 8, 12
Pairs = dict[str, tuple[Tensor, Tensor]]  # ours and the truth


class Model(nn.Module):
    """A body, a head, and the loss of the head in the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, D)
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = linear_cross_entropy(
            self.body(x), self.head.weight, target, bias=self.head.bias,
            config=Config("chunked", chunk=4),
        )  # fmt: skip
        assert isinstance(loss, Tensor)
        return loss


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, V, (N,), generator=generator)


def mesh_of(group: ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def plain_gradients(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    loss = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].t() + leaves[2], target)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def dtensor(group: ProcessGroup, placement: Placement) -> Pairs:
    """The weight as a DTensor: loss, gradients, and where the weight's gradient ends up."""
    (x, target), mesh = batch(0), mesh_of(group)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    bias = torch.randn(V, generator=generator, dtype=torch.float64)
    leaves = [
        x.clone().requires_grad_(),
        *(distribute_tensor(t, mesh, [placement]).requires_grad_() for t in (weight, bias)),
    ]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2])
    gradients = torch.autograd.grad(loss, leaves)
    assert all(isinstance(g, DTensor) for g in gradients[1:])
    assert tuple(gradients[1].placements) == (placement,)
    ours = [loss.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)]
    truth = plain_gradients(x, weight, target, bias)
    return dict(zip(("loss", "x", "weight", "bias"), zip(ours, truth, strict=True), strict=True))


def dtensor_refusal(group: ProcessGroup, placement: Placement, **options: Any) -> str:
    """What a DTensor weight that cannot be used is told."""
    x, target = batch(0)
    weight = distribute_tensor(torch.ones(V, D, dtype=torch.float64), mesh_of(group), [placement])
    if options.pop("as_split", False):
        options["process_group"] = mesh_of(group).get_group()
    try:
        linear_cross_entropy(x, weight, target, **options)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing"


def averaged(group: ProcessGroup, run: Callable[[Model, int], None]) -> dict[str, Tensor]:
    """The gradients of an unsharded model, averaged over the ranks' batches."""
    total: dict[str, Tensor] = {}
    for rank in range(group.size()):
        reference = model()
        run(reference, rank)
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, 0) + parameter.grad / group.size()
    return total


def pairs(sharded: nn.Module, truth: dict[str, Tensor]) -> Pairs:
    found = {}
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = (whole, truth[name.removeprefix("module.")])
    return found


def accumulate(loss_of: Callable[[Tensor, Tensor], Tensor], rank: int, steps: int) -> None:
    for step in range(steps):
        loss_of(*batch(10 * rank + step)).backward()


def fsdp(group: ProcessGroup, *, whole_head: bool, steps: int, sync_each: bool) -> Pairs:
    """``fully_shard`` with the loss in the model's forward; gradient accumulation."""
    sharded = model()
    if whole_head:
        fully_shard(sharded.body, mesh=mesh_of(group))
    fully_shard(sharded, mesh=mesh_of(group))
    for step in range(steps):
        sharded.set_requires_gradient_sync(sync_each or step == steps - 1)
        with CommDebugMode() as sent:
            loss = sharded(*batch(10 * group.rank() + step))
        gathers = 2 if whole_head else 1  # one for each group of parameters, whatever the chunks
        assert sum(sent.get_comm_counts().values()) == gathers, sent.get_comm_counts()
        loss.backward()
    return pairs(sharded, averaged(group, lambda m, r: accumulate(m, r, steps)))


def fsdp_outside(group: ProcessGroup) -> Pairs:
    """A sharded head used outside its module's forward, gathered once by name."""
    sharded = model()
    for module in (sharded.body, sharded.head):
        fully_shard(module, mesh=mesh_of(group))
    x, target = batch(10 * group.rank())
    head = sharded.head
    assert isinstance(head.weight, DTensor)
    hidden = sharded.body(x)
    with CommDebugMode() as sent:
        loss = linear_cross_entropy(
            hidden, gathered_weight(head.weight), target, bias=gathered_weight(head.bias),
            config=Config("chunked", chunk=4),
        )  # fmt: skip
    assert sum(sent.get_comm_counts().values()) == 2, "weight and bias once, whatever the chunks"
    assert isinstance(loss, Tensor)
    loss.backward()
    return pairs(sharded, averaged(group, lambda m, r: accumulate(m, r, 1)))


def fsdp_taken_for_split(group: ProcessGroup) -> str:
    """A data-parallel weight passed as it is: other tokens on each rank."""
    sharded = model()
    fully_shard(sharded.head, mesh=mesh_of(group))
    try:
        x, target = batch(group.rank())
        linear_cross_entropy(x, sharded.head.weight, target)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing"


def ddp(group: ProcessGroup, *, steps: int, no_sync: bool) -> Pairs:
    """DistributedDataParallel, with and without ``no_sync`` between the steps."""
    wrapped = DistributedDataParallel(model(), process_group=group)
    for step in range(steps):
        last = step == steps - 1
        x, target = batch(10 * group.rank() + step)
        if no_sync and not last:
            with wrapped.no_sync():
                wrapped(x, target).backward()
        else:
            wrapped(x, target).backward()
    return pairs(wrapped, averaged(group, lambda m, r: accumulate(m, r, steps)))


def sequence_parallel(group: ProcessGroup, reduction: str) -> Pairs:
    """x cut along its first dimension, the classes along the ranks."""
    rank, size = group.rank(), group.size()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 2, D, generator=generator, dtype=torch.float64)
    target = torch.randint(0, V, (6, 2), generator=generator)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    mine = x.chunk(size)[rank].clone().requires_grad_()
    rows = weight.tensor_split(size)[rank].clone().requires_grad_()
    loss = linear_cross_entropy(
        mine, rows, target, reduction=reduction, process_group=group, sequence_parallel=True
    )
    assert isinstance(loss, Tensor)
    dx, dw = torch.autograd.grad(loss.sum(), (mine, rows))
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    whole = torch.nn.functional.cross_entropy(
        (leaves[0] @ leaves[1].t()).view(-1, V), target.view(-1), reduction=reduction
    )
    truth = torch.autograd.grad(whole.sum(), leaves)
    return {
        "loss": (loss.detach().view(whole.shape), whole.detach()),
        "x": (dx, truth[0].chunk(size)[rank]),
        "weight": (dw, truth[1].tensor_split(size)[rank]),
    }


def main_grad(group: ProcessGroup, reduction: str) -> Pairs:
    """``grad_weight_out``: the shard's gradient goes to its buffer, padding untouched."""
    x, target = batch(0)
    bounds = [0, 12, V]
    rank = group.rank()
    mine = slice(bounds[rank], bounds[rank + 1])
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    padded = torch.cat((weight[mine], torch.ones(2, D, dtype=torch.float64))).requires_grad_()
    buffer = torch.ones_like(padded).detach()
    for _ in range(2):
        loss = linear_cross_entropy(
            x, padded, target, reduction=reduction, process_group=group,
            vocab_range=(mine.start, mine.stop), grad_weight_out=buffer,
        )  # fmt: skip
        assert isinstance(loss, Tensor)
        (2.0 * loss).sum().backward()
    assert padded.grad is None
    leaf = weight.clone().requires_grad_()
    whole = torch.nn.functional.cross_entropy(x @ leaf.t(), target, reduction=reduction)
    (truth,) = torch.autograd.grad(4.0 * whole.sum(), leaf)
    expected = torch.cat((1.0 + truth[mine], torch.ones(2, D, dtype=torch.float64)))
    return {"buffer": (buffer, expected)}


def compiled(group: ProcessGroup) -> Pairs:
    """Inside ``torch.compile``: the call breaks the graph and stays right."""
    x, target = batch(0)
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    rows = weight.tensor_split(group.size())[group.rank()].clone().requires_grad_()
    x.requires_grad_()

    @torch.compile(backend="aot_eager")
    def step(x: Tensor, rows: Tensor) -> Tensor:
        loss = linear_cross_entropy(2.0 * x, rows, target, process_group=group)
        assert isinstance(loss, Tensor)
        return 3.0 * loss

    loss = step(x, rows)
    (dx,) = torch.autograd.grad(loss, x)
    leaf = x.detach().clone().requires_grad_()
    whole = 3.0 * torch.nn.functional.cross_entropy(2.0 * leaf @ weight.t(), target)
    return {
        "loss": (loss.detach(), whole.detach()),
        "x": (dx, torch.autograd.grad(whole, leaf)[0]),
    }


def barrier(group: ProcessGroup) -> None:
    dist.barrier(group)


REPLICATE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
