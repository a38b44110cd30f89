"""Loss and every gradient of a patched model are those of the model as it comes."""

import pytest
import torch
from hf_models import FAMILIES, batch, loss_and_gradients, make

from flce_tune.integrations.on_demand import LogitsOnDemand
from flce_tune.integrations.transformers import applied

pytestmark = pytest.mark.filterwarnings("error:flce_tune computes the full logits")


def assert_same_training(model, **inputs):
    """Compare plain with patched; returns the patched outputs."""
    expected, expected_gradients = loss_and_gradients(model, **inputs)
    with applied(model):
        outputs, gradients = loss_and_gradients(model, **inputs)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=2e-6, atol=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        scale = expected_gradients[name].abs().max().item()
        torch.testing.assert_close(
            gradient,
            expected_gradients[name],
            rtol=1e-4,
            atol=3e-6 * scale,
            msg=f"gradient of {name}",
        )
    return outputs, expected


@pytest.fixture(params=FAMILIES)
def model(request):
    return make(request.param)


def test_loss_and_gradients(model):
    outputs, expected = assert_same_training(model, **batch(model))
    assert type(outputs) is type(expected)
    assert outputs.keys() == expected.keys()
    assert isinstance(outputs.logits, LogitsOnDemand)


@pytest.mark.parametrize("items", [17, torch.tensor(17)])
def test_number_of_items_in_the_batch(items):
    model = make("gemma2")
    assert_same_training(model, **batch(model), num_items_in_batch=items)


def test_shifted_labels_are_not_shifted_again():
    model = make("llama")
    inputs = batch(model)
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    outputs, _ = assert_same_training(model, **inputs, shift_labels=shifted)
    unshifted = model(**inputs)
    torch.testing.assert_close(outputs.loss, unshifted.loss)


@pytest.mark.parametrize("keep", [5, torch.arange(6, 11)])
def test_logits_to_keep(keep):
    model = make("granite")
    inputs = batch(model)
    inputs["labels"] = inputs["labels"][:, -5:]
    outputs, expected = assert_same_training(model, **inputs, logits_to_keep=keep)
    assert outputs.logits.shape == expected.logits.shape == (3, 5, 97)


def test_evaluation_gives_the_loss_and_the_logits_when_asked(model):
    model.eval()
    inputs = batch(model)
    with torch.no_grad():
        expected = model(**inputs)
        with applied(model):
            outputs = model(**inputs)
            alone = model(input_ids=inputs["input_ids"])
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=2e-6, atol=1e-6)
    assert not outputs.logits._computed
    assert outputs.logits.shape == expected.logits.shape
    torch.testing.assert_close(outputs.logits + 0, expected.logits, rtol=1e-5, atol=1e-5)
    assert type(alone.logits) is torch.Tensor
    torch.testing.assert_close(alone.logits, expected.logits)


def test_the_router_loss_is_part_of_the_loss():
    model = make("gpt_oss")
    outputs, expected = assert_same_training(model, **batch(model))
    torch.testing.assert_close(outputs.aux_loss, expected.aux_loss)
    without = model(**batch(model), output_router_logits=False)
    assert outputs.loss > without.loss + 0.1


def test_an_upstream_gradient_reaches_every_parameter():
    model = make("cohere")
    inputs = batch(model)
    (3.0 * model(**inputs).loss).backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad()
    with applied(model):
        (3.0 * model(**inputs).loss).backward()
    torch.testing.assert_close(model.lm_head.weight.grad, expected, rtol=1e-4, atol=1e-6)
