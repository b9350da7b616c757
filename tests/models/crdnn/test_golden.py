"""The CRDNN against SpeechBrain's own modules; tests/golden/make_crdnn.py made the numbers."""

import json
from typing import Any

import pytest
import torch
from tests.golden.make_crdnn import FILE, FRAMES, FRAMES_KEPT, SETTINGS, TOKENS, features, samples, weights

from sottovoce.data.audio.waveforms import Features, pad_tokens
from sottovoce.models.crdnn.decoder import teacher_forced
from sottovoce.models.crdnn.family import Draws, cross_entropy, loss
from sottovoce.models.crdnn.features import decibels
from sottovoce.models.crdnn.network import encode
from sottovoce.models.crdnn.settings import running_statistics
from sottovoce.models.ctc import mean_ctc_loss_by_token
from sottovoce.models.speechbrain import converted, settings_of, their_name

GOLDEN = json.loads(FILE.read_text())
# Theirs is float32 through some thirty layers of sums of at most 80 products, ours float64: 30·80·2⁻²⁴ at the worst.
CLOSE: dict[str, float] = {"rtol": 1.5e-4, "atol": 1.5e-5}


def golden_batch() -> Features:
    return Features(features(), torch.tensor(FRAMES), *pad_tokens(TOKENS))


def close(ours: torch.Tensor, theirs: Any) -> None:
    torch.testing.assert_close(ours.detach(), torch.tensor(theirs, dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_outputs_and_losses_are_speechbrains(mode: str) -> None:
    golden, training, batch = GOLDEN[mode], mode == "training", golden_batch()
    encoded = encode(weights(), batch, settings=SETTINGS, training=training)
    close(encoded.memory_UTD, golden["memory"])
    close(encoded.ctc_log_probs_UTV, golden["ctc_log_probs"])
    log_probs, attention = teacher_forced(
        weights(), encoded.memory_UTD, encoded.lengths_U, batch.tokens_UL, settings=SETTINGS
    )
    close(attention, golden["attention"])
    close(log_probs, golden["log_probs"])
    texts = (batch.tokens_UL, batch.token_lengths_U)
    ctc = mean_ctc_loss_by_token(encoded.ctc_log_probs_UTV, encoded.lengths_U, *texts)
    nll = cross_entropy(log_probs, *texts, smoothing=SETTINGS.label_smoothing)
    both = loss(weights(), batch, settings=SETTINGS, draws=Draws(1) if training else None)
    close(torch.stack([ctc, nll, both]), golden["losses"])


@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_gradients_are_speechbrains(mode: str) -> None:
    golden, draws = GOLDEN[mode], Draws(1) if mode == "training" else None
    parameters = {name: tensor.requires_grad_() for name, tensor in weights().items()}
    found = loss(parameters, golden_batch(), settings=SETTINGS, draws=draws)
    names = list(golden["gradient_norms"])
    gradients = torch.autograd.grad(found, [parameters[name] for name in names])
    assert set(names) | running_statistics(SETTINGS) == parameters.keys()
    close(torch.stack([gradient.norm() for gradient in gradients]), [golden["gradient_norms"][name] for name in names])


def test_statistics_go_where_batch_norm_takes_them() -> None:
    """What arrives as their gradient is the way back."""
    parameters = {name: tensor.requires_grad_() for name, tensor in weights().items()}
    found = loss(parameters, golden_batch(), settings=SETTINGS, draws=Draws(1))
    for name, after in GOLDEN["training"]["statistics"].items():
        (back,) = torch.autograd.grad(found, parameters[name], retain_graph=True)
        close(parameters[name] - back, after)


def test_features_are_speechbrains() -> None:
    """Decibels: a relative error of 400·2⁻²⁴ in a spectrum's power, that of its weakest bin perhaps a hundred times."""
    found = decibels(samples().float())[:, FRAMES_KEPT].double()
    torch.testing.assert_close(found, torch.tensor(GOLDEN["front"]["features"], dtype=torch.float64), rtol=0, atol=1e-2)


def test_a_checkpoint_of_theirs_becomes_ours() -> None:
    ours = {name: tensor.float() for name, tensor in weights().items()}
    state = {
        their_name(name): t.transpose(2, 3) if name.startswith("cnn.") and t.dim() == 4 else t
        for name, t in ours.items()
    }
    state["0.DNN.block_0.norm.norm.num_batches_tracked"] = torch.tensor(7)
    settings = settings_of(state, where="model.ckpt", dropout=0.0)
    assert settings == SETTINGS
    found = converted(state, settings, where="model.ckpt")
    assert all(torch.equal(found[name], tensor) for name, tensor in ours.items())
    assert found.keys() == ours.keys()
