import math

import pytest
import torch

from tokenseek_trainer import scoring
from tokenseek_trainer.config import TokenSeekConfig
from tokenseek_trainer.instances import find_instances
from tokenseek_trainer.testing import packed_batch, ragged_batch


def padding_only_row():
    batch = ragged_batch((4, 6, 3), left=True)
    batch["attention_mask"][1] = 0
    batch["labels"][1] = -100
    return batch


BATCHES = {
    "ragged": ragged_batch((4, 1, 9, 6)),
    "left": ragged_batch((4, 1, 9, 6), left=True),
    "padded to 16": ragged_batch((5, 11), pad_to=16),
    "one token": ragged_batch((1,)),
    "all labels masked": ragged_batch((4, 7), n_prompt=9),
    "packed": packed_batch((1, 5, 2, 8)),
    "a row of padding only": padding_only_row(),
}
each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


def instances_of(batch):
    return find_instances(batch, batch["labels"], shift=True)


def by_instance(instances):
    """The (row, position) pairs of each instance."""
    rows = instances.ids.tolist()
    return [
        [(row, j) for row, ids in enumerate(rows) for j, number in enumerate(ids) if number == wanted]
        for wanted in range(instances.count)
    ]


def noise(instances, garbage=1e9):
    """Random values of both signs; what stands at padding must not matter."""
    return torch.randn(instances.ids.shape, dtype=torch.float64).masked_fill(instances.ids < 0, garbage)


# Attention received.


def dense_attention(query, key, allowed, scaling):
    """Softmax attention with one Python loop per index. Head h reads key head h // (H / G)."""
    batch, heads, n_queries, width = query.shape
    group = heads // key.shape[1]
    result = torch.zeros(batch, heads, n_queries, key.shape[2], dtype=torch.float64)
    q, k = query.double().tolist(), key.double().tolist()
    for b in range(batch):
        for h in range(heads):
            for i in range(n_queries):
                seen = [j for j in range(key.shape[2]) if allowed[b, 0, i, j]]
                products = [
                    scaling * math.fsum(q[b][h][i][d] * k[b][h // group][j][d] for d in range(width)) for j in seen
                ]
                exponentials = [math.exp(product - max(products)) for product in products]
                for j, exponential in zip(seen, exponentials, strict=True):
                    result[b, h, i, j] = exponential / math.fsum(exponentials)
    return result


def attention_problem(batch, heads, groups, causal=True, width=5):
    instances = instances_of(batch)
    rows, n = instances.ids.shape
    query = torch.randn(rows, heads, n, width, dtype=torch.float64) * 2
    key = torch.randn(rows, groups, n, width, dtype=torch.float64) * 2
    # A query sees the tokens of its own document, in a causal model up to itself; a padding query sees nothing.
    same = (instances.ids[:, :, None] == instances.ids[:, None, :]) & (instances.ids >= 0)[:, :, None]
    allowed = (same & torch.ones(n, n, dtype=torch.bool).tril() if causal else same)[:, None]
    return query, key, allowed, instances.ids >= 0


@each_batch
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
def test_attention_received_is_the_column_sum_of_the_full_softmax(batch, heads, groups, monkeypatch):
    for causal in (True, False):
        query, key, allowed, real = attention_problem(batch, heads, groups, causal)
        dense = dense_attention(query, key, allowed, scaling=0.6)
        rows, n = real.shape
        expected = torch.zeros(rows, n, dtype=torch.float64)
        for b, j in real.nonzero().tolist():
            given = [float(dense[b, h, i, j]) for h in range(heads) for i in range(n) if real[b, i]]
            expected[b, j] = math.fsum(given) / heads
        assert torch.allclose(expected.sum(1), real.sum(1).double())  # every real query gives away exactly 1

        for queries_per_chunk in (1, 3, n):
            monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", queries_per_chunk * rows * heads * n)
            asked = []

            def weights_of(positions, asked=asked, query=query, key=key, allowed=allowed):
                asked.append(positions)
                where = positions[0]
                return scoring.eager_attention_weights(query[:, :, where], key, allowed[:, :, where], 0.6)

            received = scoring.attention_received(weights_of, real, heads)
            assert received.dtype == torch.float64
            assert torch.allclose(received, expected, rtol=1e-12, atol=1e-14)
            assert received[~real].abs().sum() == 0
            assert max(positions.shape[1] for positions in asked) == min(queries_per_chunk, n)
            assert torch.equal(torch.cat(asked, 1), torch.arange(n).expand(rows, -1))


def test_padding_neither_gives_nor_receives_even_if_the_model_attends_to_it():
    real = torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])
    probabilities = torch.rand(2, 3, 5, 5, dtype=torch.float64)
    received = scoring.attention_received(lambda positions: probabilities[:, :, positions[0]], real, n_heads=3)
    for b in range(2):
        for j in range(5):
            given = [float(probabilities[b, h, i, j]) for h in range(3) for i in range(5) if real[b, i] and real[b, j]]
            assert float(received[b, j]) == pytest.approx(math.fsum(given) / 3, rel=1e-13)


def test_a_chunk_is_one_query_even_if_that_is_more_than_the_limit(monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", 1)
    query, key, allowed, real = attention_problem(ragged_batch((5, 9)), 4, 2)
    sizes = []

    def weights_of(positions):
        sizes.append(positions.shape[1])
        return scoring.eager_attention_weights(query[:, :, positions[0]], key, allowed[:, :, positions[0]], 0.6)

    scoring.attention_received(weights_of, real, 4)
    assert sizes == [1] * 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_probabilities_of_low_precision_are_summed_in_float32(dtype):
    # 4096 queries that each give 1/4096: bfloat16 sums stall at 1/16.
    n = 4096
    received = scoring.attention_received(
        lambda positions: torch.full((1, 1, positions.shape[1], n), 1 / n, dtype=dtype),
        torch.ones(1, n, dtype=torch.bool),
        n_heads=1,
    )
    assert received.dtype == torch.float32
    assert torch.allclose(received, torch.ones(1, n), rtol=1e-5, atol=0)


@each_batch
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (4, 2), (5, 1)])
def test_eager_attention_weights_equal_a_loop_where_something_is_seen(batch, heads, groups):
    query, key, allowed, real = attention_problem(batch, heads, groups)
    found = scoring.eager_attention_weights(query, key, allowed, scaling=0.3)
    expected = dense_attention(query, key, allowed, scaling=0.3)
    seeing = real[:, None, :, None].expand_as(found)
    assert torch.allclose(found[seeing], expected[seeing], rtol=1e-12, atol=1e-15)
    n = real.shape[1]
    assert torch.allclose(found[~seeing], torch.full_like(found[~seeing], 1 / n))
    assert found.isfinite().all()


def test_eager_attention_weights_of_half_precision_are_computed_in_float32():
    query, key, allowed, _ = attention_problem(ragged_batch((9,)), 4, 2)
    query, key = query.bfloat16(), key.bfloat16()
    found = scoring.eager_attention_weights(query, key, allowed, scaling=0.3)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), dense_attention(query, key, allowed, 0.3), rtol=1e-5, atol=1e-7)


def test_attention_and_its_sums_stay_in_float32_under_autocast():
    query, key, allowed, real = attention_problem(ragged_batch((9, 4)), 4, 2)
    query, key = query.float(), key.float()

    def weights_of(positions):
        return scoring.eager_attention_weights(query[:, :, positions[0]], key, allowed[:, :, positions[0]], 0.3)

    expected = scoring.attention_received(weights_of, real, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scoring.attention_received(weights_of, real, 4)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


# Gradient magnitude.


def test_gradient_magnitude_is_the_sum_of_absolute_values_over_the_width():
    gradient = torch.randn(3, 7, 33, dtype=torch.float64)
    gradient[1, 4] = 0
    expected = [[math.fsum(abs(x) for x in token) for token in row] for row in gradient.tolist()]
    found = scoring.gradient_magnitude(gradient)
    assert found.dtype == torch.float64
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradient_magnitude_of_low_precision_is_summed_in_float32(dtype):
    gradient = torch.randn(1, 2, 4096).to(dtype)
    expected = [[math.fsum(abs(x) for x in token) for token in row] for row in gradient.double().tolist()]
    found = scoring.gradient_magnitude(gradient)
    assert found.dtype == torch.float32
    assert torch.allclose(found, torch.tensor(expected), rtol=1e-5, atol=0)


# Min-max, combination, importance.


@each_batch
@pytest.mark.parametrize("garbage", [1e9, -1e9])
def test_minmax_scales_every_instance_by_itself(batch, garbage):
    instances = instances_of(batch)
    values = noise(instances, garbage)
    expected = torch.zeros_like(values)
    for positions in by_instance(instances):
        low = min((float(values[place]) for place in positions), default=0.0)
        high = max((float(values[place]) for place in positions), default=0.0)
        for place in positions:
            expected[place] = (values[place] - low) / (high - low) if high > low else 0.0
    assert torch.equal(scoring.minmax(values, instances), expected)


def test_minmax_of_equal_values_is_zero_beside_an_instance_that_is_scaled():
    instances = instances_of(ragged_batch((3, 5), left=True))
    values = torch.tensor([[9.0, 9.0, 7.0, 7.0, 7.0], [4.0, 2.0, 3.0, 2.0, 6.0]])
    assert scoring.minmax(values, instances).tolist() == [[0.0] * 5, [0.5, 0.0, 0.25, 0.0, 1.0]]


@each_batch
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (0.5, 3), (2, 0), (0, 0.25)])
def test_tokenseek_score_is_alpha_log_context_plus_beta_minmax_gradient(batch, alpha, beta):
    instances = instances_of(batch)
    context = torch.rand(instances.ids.shape).masked_fill(instances.ids < 0, 0)
    gradient = torch.rand(instances.ids.shape).masked_fill(instances.ids < 0, 1e9)
    config = TokenSeekConfig(scorer="tokenseek", alpha=alpha, beta=beta)
    score = scoring.combine(context if alpha else None, gradient if beta else None, instances, config)
    assert score.dtype == torch.float64
    for positions in by_instance(instances):
        values = [float(gradient[place]) for place in positions]
        for place, value in zip(positions, values, strict=True):
            scaled = (value - min(values)) / (max(values) - min(values)) if max(values) > min(values) else 0.0
            expected = alpha * math.log(float(context[place])) + beta * scaled
            assert float(score[place]) == pytest.approx(expected, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("scorer", ["context", "gradient"])
def test_a_single_score_is_used_as_it_is(scorer):
    instances = instances_of(ragged_batch((4, 9)))
    context, gradient = torch.rand(2, 9), torch.rand(2, 9)
    config = TokenSeekConfig(scorer=scorer)
    score = scoring.combine(
        context if scorer == "context" else None, gradient if scorer == "gradient" else None, instances, config
    )
    assert score.dtype == torch.float64
    assert torch.equal(score.float(), context if scorer == "context" else gradient)


def test_a_token_that_receives_no_attention_scores_lowest_but_finite():
    instances = instances_of(ragged_batch((4,)))
    context = torch.tensor([[1.0, 0.0, 1e-30, 0.5]])
    score = scoring.combine(context, torch.zeros(1, 4), instances, TokenSeekConfig(scorer="tokenseek"))
    assert score[0, [0, 2, 3]].tolist() == pytest.approx([0.0, math.log(1e-30), math.log(0.5)], rel=1e-6)
    assert score[0, 1].isfinite()
    assert score[0, 1] < -600


@each_batch
def test_tokenseek_importance_is_proportional_to_exp_of_the_score(batch):
    instances = instances_of(batch)
    score = noise(instances) * 5
    found = scoring.importance(score, instances, TokenSeekConfig(scorer="tokenseek"))
    for positions in by_instance(instances):
        top = max((float(score[place]) for place in positions), default=0.0)
        for place in positions:
            assert float(found[place]) == pytest.approx(math.exp(float(score[place]) - top), rel=1e-13)
    assert found[instances.ids < 0].abs().sum() == 0


def test_importance_does_not_overflow_and_each_instance_has_its_own_scale():
    instances = instances_of(packed_batch((2, 2)))
    score = torch.tensor([[5000.0, 4999.0, -5000.0, -5001.0]], dtype=torch.float64)
    found = scoring.importance(score, instances, TokenSeekConfig(scorer="tokenseek"))
    assert found[0].tolist() == pytest.approx([1.0, math.exp(-1), 1.0, math.exp(-1)], rel=1e-13)


def test_importance_of_a_pure_context_score_is_proportional_to_the_context():
    instances = instances_of(ragged_batch((9,)))
    context = torch.rand(1, 9, dtype=torch.float64)
    config = TokenSeekConfig(scorer="tokenseek", alpha=1, beta=0)
    found = scoring.importance(scoring.combine(context, None, instances, config), instances, config)
    assert torch.allclose(found / found.sum(), context / context.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scorer", ["context", "gradient", "random"])
def test_other_scores_are_their_own_importance(scorer):
    instances = instances_of(ragged_batch((4, 9)))
    score = torch.rand(2, 9, dtype=torch.float64)
    assert torch.equal(scoring.importance(score.clone(), instances, TokenSeekConfig(scorer=scorer)), score)
