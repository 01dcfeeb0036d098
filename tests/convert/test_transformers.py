"""Exports load in Transformers, if it is installed."""

import pytest
import torch

import limpet

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("max_shard_size", [10**9, 50_000])
def test_a_model_is_loaded_and_generates(is_tied, max_shard_size, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=is_tied,
    )  # fmt: skip
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    limpet.save(tmp_path / "run" / "version_1", {"model": model})
    out = tmp_path / "out"
    limpet.export(f"{tmp_path}/run@1", out, max_shard_size=max_shard_size)
    config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(report.values()), report
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    tokens = torch.tensor([[1, 2, 3]])
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(tokens, **settings), loaded.generate(tokens, **settings))
