"""LoRA adapters as peft has them: ranks, training, export."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from fednmap import InputError, run
from fednmap.algorithms import FedNMap
from fednmap.models import lora, mlp
from fednmap.problems import Network
from fednmap.regularizers import rank_components

peft = pytest.importorskip("peft")
hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, as peft calls it


def base():
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def adapted(**options):
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["c_attn"], fan_in_fan_out=True, **options)
    return peft.get_peft_model(base(), config)


def outputs(module, ids):
    with torch.no_grad():
        return module.eval()(ids).logits


@pytest.mark.parametrize("rslora", [False, True])
def test_an_exported_adapter_is_read_by_peft_and_computes_the_same(tmp_path, rslora):
    module = adapted(use_rslora=rslora)
    pairs = list(lora.factors(module).values())
    for k, (a, b) in enumerate(pairs):
        torch.nn.init.normal_(b)
        b[:, : k + 1] = 0
        a[0] = 0
    ids = torch.randint(16, (3, 8))
    expected = outputs(module, ids)
    assert list(lora.save(module, tmp_path).values()) == list(lora.ranks(module).values()) == [3, 2]
    torch.testing.assert_close(outputs(peft.PeftModel.from_pretrained(base(), str(tmp_path)), ids), expected)
    assert sorted(json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"].values()) == [2, 3]
    again = peft.PeftModel.from_pretrained(base(), str(tmp_path), is_trainable=True)
    assert sum(p.numel() for p in again.parameters() if p.requires_grad) == 5 * (16 + 48)


def test_a_zero_adapter_is_the_base_model(tmp_path):
    module = adapted()
    ids = torch.randint(16, (3, 8))
    assert list(lora.save(module, tmp_path).values()) == [1, 1]  # B is 0 at first
    torch.testing.assert_close(
        outputs(peft.PeftModel.from_pretrained(base(), str(tmp_path)), ids), outputs(base(), ids)
    )


def test_other_modules_are_refused(tmp_path):
    with pytest.raises(InputError, match="LoRA adapters"):
        lora.ranks(mlp(4, 2))


def test_a_run_with_a_penalty_by_rank_is_exported(tmp_path):
    module, ids = adapted(), torch.randint(16, (3, 8))
    for a, _ in lora.factors(module).values():
        a[2:] *= 0.05  # what is small goes first
    data = [(torch.randint(16, (6, 8)), torch.randint(16, (6, 8))) for _ in range(3)]
    problem = Network(module, cross_entropy, data, batch_size=4, forward="token_logits")
    result = run(FedNMap(rank_components(0.02, module), eta_a=0.3, Q=3), problem, rounds=15)
    trained = result.module()
    kept = lora.ranks(trained)
    assert 0 < sum(kept.values()) < 8
    lora.save(trained, tmp_path)
    torch.testing.assert_close(
        outputs(peft.PeftModel.from_pretrained(base(), str(tmp_path)), ids), outputs(trained, ids), rtol=1e-4, atol=1e-5
    )
