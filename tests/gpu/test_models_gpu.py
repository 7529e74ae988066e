"""Models of transformers and diffusers in bf16, with the kernels as their attention."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

import toy_models
from toy_models import MODELS

from flash_attention.integrations import diffusers, transformers
from flash_helpers.tune.best import choose_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_its_own_attention_does(name):
    transformers.register()
    diffusers.register()
    model, batch, tokens = MODELS[name], 2, 300
    for problem in model.problems(batch, tokens):
        try:
            choose_config(problem, torch.device("cuda", torch.cuda.current_device()))
        except ValueError as refusal:
            pytest.skip(str(refusal))
    with torch.no_grad():
        usual, lab = toy_models.errors(model, batch, tokens, "cuda")
    assert lab <= 2 * usual
