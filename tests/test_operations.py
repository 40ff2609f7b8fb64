"""Counted operations beside closed forms, and beside the products of a real step."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tokenseek_trainer import TokenSeekConfig, losses
from tokenseek_trainer.estimate import estimate
from tokenseek_trainer.operations import Operations
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.testing import tiny_model


ROWS, TOKENS, RATIO = 2, 96, 0.25
WIDTH, INNER, GROUPS, HEAD, VOCABULARY, BLOCKS = 32, 48, 2, 8, 64, 3
PRODUCTS = 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * GROUPS * HEAD + 3 * WIDTH * INNER)  # of a block, a token, forward


def attention(queries, keys):
    """Scores and values, operations of the forward."""
    return 4 * queries * keys * WIDTH


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_ordinary_step_is_three_forwards_or_four(checkpointing):
    found = estimate(tiny_model("llama").config, tokens=TOKENS, batch=ROWS, dtype="fp32", checkpointing=checkpointing)
    n, seen = ROWS * TOKENS, ROWS * TOKENS * (TOKENS + 1) / 2
    again = n * (PRODUCTS - 2 * WIDTH * INNER) + attention(seen, 1)  # the block's last product is not needed again
    expected = BLOCKS * (n * PRODUCTS * 3 + attention(seen, 1) * 3.5) + 3 * 2 * n * WIDTH * VOCABULARY
    assert found.operations == pytest.approx(expected + BLOCKS * again * checkpointing, rel=1e-6)


def test_a_step_with_random_tokens_is_a_forward_and_all_of_the_kept_ones():
    """The first block's input, and the last block of the ditched, need no more than that."""
    config = TokenSeekConfig(ratio=RATIO, scorer="random", selection="topk", min_tokens=1)
    found = estimate(tiny_model("llama").config, tokens=TOKENS, batch=ROWS, dtype="fp32", tokenseek=config)
    n, k, seen = ROWS * TOKENS, ROWS * TOKENS * RATIO, ROWS * TOKENS * (TOKENS + 1) / 2
    forward = BLOCKS * (n * PRODUCTS + attention(seen, 1))
    kept = BLOCKS * (k * PRODUCTS * 3 + attention(k * TOKENS, 1) * 3.5) + 3 * 2 * k * WIDTH * VOCABULARY
    assert found.operations == pytest.approx(forward + kept, rel=0.02)


class Products(TorchDispatchMode):
    """Counts plain matrix products by their outputs' sizes, and those of masked attention: two forward, five backward."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output, aten = function(*args, **(kwargs or {})), torch.ops.aten
        if function in (aten.mm.default, aten.bmm.default):
            self.total += 2 * output.numel() * args[0].shape[-1]
        elif function == aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.total += 2 * 2 * args[0].numel() * args[1].shape[2]
        elif function == aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.total += 5 * 2 * args[1].numel() * args[2].shape[2]
        assert function not in (aten.addmm.default, aten.baddbmm.default)
        return output


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("ratio", [0.25, 0.9])
def test_the_estimate_counts_the_products_of_a_real_step(monkeypatch, ratio, parts):
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", 1)
    monkeypatch.setattr(losses, "CHUNK_LOGITS", VOCABULARY * 8)  # far more than the two chunks that the estimate runs
    settings = TokenSeekConfig(ratio=ratio, parts=parts, selection="topk", min_tokens=1)
    config = tiny_model("llama").config
    config._attn_implementation = "eager"  # plain products; the kept tokens have a mask anyway
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    ids = torch.randint(3, 60, (ROWS, TOKENS))
    with TokenSeekSession(model, settings) as session, Products() as products:
        batch = {"input_ids": ids, "labels": ids}
        instances = session.instances(batch)
        selection = select(session.seek(batch, instances).scores(instances, settings, 0), instances, settings)
        to_come = selection.parts(parts)
        while to_come:
            part, *to_come = to_come
            session.ditch(batch, instances, part, to_come=to_come).backward()
    found = estimate(config, tokens=TOKENS, batch=ROWS, tokenseek=settings, dtype="fp32")
    assert found.operations == pytest.approx(products.total, rel=0.02)


def test_fused_attention_counts_as_its_products_do():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    with Operations() as causal:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert causal.total == 2 * 4 * (16 * 17 / 2) * (4 + 10) * 8
    few = q.detach()[:, :, :5].requires_grad_()
    with Operations() as masked:
        torch.nn.functional.scaled_dot_product_attention(
            few, k, v, attn_mask=torch.ones(5, 16).bool()
        ).sum().backward()
    assert masked.total == 2 * 4 * 5 * 16 * (4 + 10) * 8


def test_grouped_products_of_experts_are_counted():
    tokens, weights = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(4, 32, 48, dtype=torch.bfloat16)
    ends = torch.tensor([4, 4, 10, 16], dtype=torch.int32)
    with Operations() as operations:
        torch._grouped_mm(tokens, weights, offs=ends)
    assert operations.total == 2 * 16 * 32 * 48


def test_a_part_stands_for_all():
    a = torch.randn(4, 4, requires_grad=True)
    with Operations() as operations:
        with operations.standing_for(5):
            b = a @ a
        operations.backward_standing_for(5, b, a)
        b.sum().backward()
        a.detach() @ a.detach()
    assert operations.total == 2 * 64 * (5 + 2 * 5 + 1)
