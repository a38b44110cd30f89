"""What apply changes, what it leaves alone, and how it is undone."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from hf_models import VOCAB, batch, loss_and_gradients, make
from torch import nn

from flce_tune.integrations import deferred
from flce_tune.integrations.on_demand import LogitsOnDemand
from flce_tune.integrations.transformers import applied, apply, causal_loss, undo

pytestmark = pytest.mark.filterwarnings("error:flce_tune computes the full logits")


@pytest.fixture
def model():
    return make("llama")


@pytest.fixture
def calls(monkeypatch):
    """The options of each call of the op."""
    seen = []
    op = deferred.linear_cross_entropy

    def spy(*args, **options):
        seen.append(options)
        return op(*args, **options)

    monkeypatch.setattr(deferred, "linear_cross_entropy", spy)
    return seen


def assert_untouched(model):
    assert "forward" not in model.__dict__
    assert "_loss_function" not in model.__dict__
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not hasattr(module, "_flce_tune")


# Applying and undoing


def test_apply_returns_the_model_and_undo_restores_it(model, calls):
    assert apply(model) is model
    model(**batch(model))
    assert len(calls) == 1
    assert undo(model) is model
    assert_untouched(model)
    model(**batch(model))
    assert len(calls) == 1


def test_the_context_manager_undoes_after_an_error(model):
    with pytest.raises(RuntimeError, match="boom"), applied(model):
        raise RuntimeError("boom")
    assert_untouched(model)
    undo(model)  # without effect
    assert_untouched(model)


def test_applying_twice_takes_the_last_options(model, calls):
    apply(model)
    apply(model, workspace_limit=1 << 20, accumulate="weight_dtype")
    model(**batch(model))
    assert calls[0]["workspace_limit"] == 1 << 20
    assert calls[0]["accumulate"] == "weight_dtype"
    undo(model)
    assert_untouched(model)


def test_tile_skip_changes_nothing_where_nothing_can_be_skipped(model, calls):
    gradients = []
    for options in ({}, {"tile_skip": 1e-6}):
        model.zero_grad()
        apply(model, **options)(**batch(model)).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert [call["tile_skip"] for call in calls] == [None, 1e-6]
    torch.testing.assert_close(*gradients)


def test_the_number_of_items_is_applied_inside_the_op(model, calls):
    apply(model)(**batch(model), num_items_in_batch=17)
    assert calls[0]["divisor"] == 17


def test_the_signature_stays(model):
    before = inspect.signature(model.forward)
    apply(model)
    assert inspect.signature(model.forward) == before


def test_a_copy_is_patched_too_and_independent(model, calls):
    expected = apply(model)(**batch(model)).loss
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    torch.testing.assert_close(twin(**batch(twin)).loss, expected)
    assert len(calls) == 2
    undo(twin)
    assert_untouched(twin)
    model(**batch(model))
    assert len(calls) == 3


def test_a_wrapper_put_around_ours_keeps_working_after_undo(model, calls):
    apply(model)
    inner = model.forward
    model.forward = lambda **inputs: inner(**inputs)
    undo(model)
    outputs = model(**batch(model))
    assert not calls
    assert type(outputs.logits) is torch.Tensor
    apply(model)
    model(**batch(model))
    assert len(calls) == 1


def test_a_forward_that_stood_in_the_instance_is_kept(model, calls):
    original = model.forward
    model.forward = lambda *args, **inputs: original(*args, **inputs)
    before = model.forward
    apply(model)(**batch(model))
    assert len(calls) == 1
    assert undo(model).forward is before


def test_the_state_dict_is_the_same(model):
    before = list(model.state_dict())
    assert list(apply(model).state_dict()) == before


# Calls


def test_labels_by_position(model, calls):
    inputs = batch(model)
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    arguments = [inputs.get(name) for name in names[: names.index("labels") + 1]]
    expected = model(*arguments).loss
    torch.testing.assert_close(apply(model)(*arguments).loss, expected)
    assert len(calls) == 1


@pytest.mark.filterwarnings("default")
def test_a_tuple_instead_of_a_dictionary(model):
    inputs = batch(model)
    expected = model(**inputs, return_dict=False)
    outputs = apply(model)(**inputs, return_dict=False)
    assert isinstance(outputs, tuple)
    assert len(outputs) == len(expected)
    torch.testing.assert_close(outputs[0], expected[0])
    assert isinstance(outputs[1], LogitsOnDemand)


def test_generation_is_untouched(model, calls):
    inputs = {"input_ids": batch(model)["input_ids"], "max_new_tokens": 5, "do_sample": False}
    model.eval()
    expected = model.generate(**inputs, pad_token_id=0)
    assert torch.equal(apply(model).generate(**inputs, pad_token_id=0), expected)
    assert not calls


def test_a_call_without_labels_inside_a_loss_is_plain(model):
    """The head defers only while a call asks for a loss, whatever raises."""
    apply(model)
    with pytest.raises(ValueError, match="target must have shape"):
        model(input_ids=batch(model)["input_ids"], labels=torch.zeros(3, 4, dtype=torch.long))
    assert type(model(input_ids=batch(model)["input_ids"]).logits) is torch.Tensor
    assert type(model.lm_head(torch.zeros(1, 32))) is torch.Tensor


def test_gradient_checkpointing(model):
    inputs = batch(model)
    expected, expected_gradients = loss_and_gradients(model.train(), **inputs)
    model.gradient_checkpointing_enable()
    with applied(model):
        outputs, gradients = loss_and_gradients(model, **inputs)
    torch.testing.assert_close(outputs.loss, expected.loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5)


def test_compiled_without_a_graph_break():
    model = make("gemma2", num_hidden_layers=1)
    inputs = batch(model)
    expected, expected_gradients = loss_and_gradients(model, **inputs)
    apply(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    outputs, gradients = loss_and_gradients(compiled, **inputs)
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert outputs.logits is None
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[name.removeprefix("_orig_mod.")], rtol=1e-4, atol=1e-5
        )
    plain = compiled(input_ids=inputs["input_ids"])
    assert plain.logits.shape == (3, 11, VOCAB)


def test_autocast(model, calls):
    inputs = batch(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**inputs)
        outputs = apply(model)(**inputs)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-2, atol=0)
    assert outputs.loss.dtype == torch.float32
    assert outputs.logits.dtype == expected.logits.dtype
    torch.testing.assert_close(outputs.logits.detach(), expected.logits.detach())
    assert len(calls) == 1


def test_hooks_on_the_head_are_honoured(model, calls):
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    inputs = batch(model)
    expected = model(**inputs).loss
    torch.testing.assert_close(apply(model)(**inputs).loss, expected)
    assert calls[0]["logit_scale"] == 0.5


@pytest.mark.filterwarnings("default")
def test_code_that_cannot_be_recorded_gives_the_models_own_result(model, calls):
    shift = torch.linspace(-3.0, 3.0, VOCAB)
    model.lm_head.register_forward_hook(lambda module, args, output: output + shift)
    inputs = batch(model)
    expected, expected_gradients = loss_and_gradients(model, **inputs)
    with pytest.raises(ValueError, match="a sum with something else"):
        apply(model)
    model.lm_head._forward_hooks.clear()
    apply(model)  # what comes after the head is seen in a call only
    model.lm_head.register_forward_hook(lambda module, args, output: output + shift)
    with pytest.warns(UserWarning, match="flce_tune computes the full logits"):
        outputs, gradients = loss_and_gradients(model, **inputs)
    assert not calls
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(gradients["lm_head.weight"], expected_gradients["lm_head.weight"])


def test_a_loss_of_the_users_own_is_kept(model, calls):
    def smoothed(logits, labels, vocab_size, **kwargs):
        logits = logits[..., :-1, :].contiguous().view(-1, vocab_size)
        return F.cross_entropy(logits, labels[..., 1:].reshape(-1), label_smoothing=0.1)

    model.loss_function = smoothed
    inputs = batch(model)
    expected, expected_gradients = loss_and_gradients(model, **inputs)
    with applied(model):
        outputs, gradients = loss_and_gradients(model, **inputs)
    assert calls[0]["label_smoothing"] == 0.1
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(gradients["lm_head.weight"], expected_gradients["lm_head.weight"])
    assert model.loss_function is smoothed


def test_causal_loss_of_plain_logits_is_that_of_transformers(model):
    inputs = batch(model)
    logits = model(input_ids=inputs["input_ids"]).logits
    expected = model.loss_function(logits, inputs["labels"], VOCAB)
    torch.testing.assert_close(causal_loss(logits, inputs["labels"], VOCAB), expected)


def test_every_label_ignored_is_nan_without_a_nan_gradient(model):
    inputs = batch(model)
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    outputs, gradients = loss_and_gradients(apply(model), **inputs)
    assert outputs.loss.isnan()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


# Refusals


class Quantised(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.round())


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (Quantised(32, VOCAB), "Quantised has a forward of its own"),
        (nn.Linear(32, VOCAB).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (nn.Bilinear(32, 32, VOCAB), "no nn.Linear in it"),
        (nn.Sequential(nn.Linear(32, VOCAB), nn.ReLU()), "relu on its output"),
        (nn.Sequential(nn.Linear(32, VOCAB), nn.Linear(VOCAB, 7)), "linear on its output"),
    ],
    ids=["quantised", "float8", "no linear", "activation", "in the middle"],
)
def test_a_head_that_cannot_be_fused_is_refused_by_name(model, head, reason):
    model.lm_head = head
    with pytest.raises(ValueError, match=f"the head of LlamaForCausalLM, a .*{reason}"):
        apply(model)
    assert_untouched(model)


def test_a_hidden_layer_in_the_head_is_no_obstacle(model, calls):
    model.lm_head = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, VOCAB))
    expected, expected_gradients = loss_and_gradients(model, **batch(model))
    outputs, gradients = loss_and_gradients(apply(model), **batch(model))
    assert len(calls) == 1
    torch.testing.assert_close(outputs.loss, expected.loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrap", [lambda model: model.lm_head, torch.compile, nn.DataParallel, lambda model: None]
)
def test_something_else_than_the_model_itself(model, wrap):
    wrong = wrap(model)
    with pytest.raises(TypeError, match=f"got {type(wrong).__name__}: give it the model itself"):
        apply(wrong)


def test_a_model_without_a_head(model):
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        apply(model.model)
    assert_untouched(model)
