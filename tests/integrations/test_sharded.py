"""FSDP2 around a patched model; one process is enough, its parameters are sharded all the same."""

import pytest
import torch
import torch.distributed as dist
from hf_models import batch, loss_and_gradients, make
from torch.distributed.fsdp import fully_shard

from flce_tune.integrations.transformers import apply


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("first", [True, False], ids=["apply first", "shard first"])
def test_a_head_in_the_roots_group(mesh, first):
    expected, expected_gradients = loss_and_gradients(make("llama"), **batch(make("llama")))
    model = make("llama")
    model = sharded(apply(model), mesh) if first else apply(sharded(model, mesh))
    outputs, gradients = loss_and_gradients(model, **batch(model))
    torch.testing.assert_close(outputs.loss, expected.loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient.full_tensor(), expected_gradients[name], rtol=1e-4, atol=1e-6
        )


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_a_head_sharded_by_itself_is_refused(mesh):
    model = apply(make("llama"))
    fully_shard(model.lm_head, mesh=mesh)
    sharded(model, mesh)
    with pytest.raises(ValueError, match="leave it to the root's fully_shard"):
        model(**batch(model))
    model = make("llama")
    fully_shard(model.lm_head, mesh=mesh)
    with pytest.raises(ValueError, match="leave it to the root's fully_shard"):
        apply(sharded(model, mesh))


def test_an_empty_partition_is_refused():
    model = apply(make("llama"))
    model.lm_head.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(ValueError, match="ZeRO-3"):
        model(**batch(model))
