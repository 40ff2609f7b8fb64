import math
from statistics import NormalDist
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from tokenseek_trainer.config import TokenSeekConfig
from tokenseek_trainer.errors import InputError
from tokenseek_trainer.instances import find_instances
from tokenseek_trainer.selection import (
    candidates,
    draw,
    inclusion_probabilities,
    random_scores,
    select,
    select_given,
    systematic_sample,
)
from tokenseek_trainer.testing import ragged_batch


def config(**settings):
    return TokenSeekConfig(**{"selection": "topk", **settings})


def instances_of(batch):
    return find_instances(batch, batch["labels"], shift=True)


def packed(lengths, n_prompt=2, seed=0):
    """One row of documents without an attention mask."""
    rows = [ragged_batch((length,), n_prompt=n_prompt, seed=seed) for length in lengths]
    return {name: torch.cat([row[name] for row in rows], 1) for name in ("input_ids", "labels", "position_ids")}


def stacked(*batches):
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def with_holes(batch, every):
    batch["labels"][:, ::every] = -100
    return batch


def unsupervised_ends(batch, count):
    batch["labels"][:, -count:] = -100
    return batch


BATCHES = {
    "ragged": ragged_batch((13, 1, 20, 4, 2), n_prompt=2),
    "left": with_holes(ragged_batch((13, 1, 20, 4, 2), n_prompt=3, left=True), 4),
    "left, last tokens without loss": unsupervised_ends(ragged_batch((13, 30), left=True), 6),
    "padded to 16": with_holes(ragged_batch((9, 3), pad_to=16), 3),
    "one token": ragged_batch((1,)),
    "all labels masked": ragged_batch((4, 7), n_prompt=9),
    "packed": packed((5, 1, 14, 2, 23)),
    "two packed rows": with_holes(stacked(packed((6, 1, 13)), packed((9, 11), seed=1)), 5),
}
each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


def places(instances, number):
    """The (row, position) pairs of an instance in reading order, and those of them that carry a loss."""
    ids, targets = instances.ids.tolist(), instances.targets.tolist()
    where = [(row, j) for row in range(len(ids)) for j in range(len(ids[row])) if ids[row][j] == number]
    return where, [(row, j) for row, j in where if targets[row][j] != -100]


def candidate_loop(instances, number, settings, causal):
    where, supervised = places(instances, number)
    if (settings.select_from == "supervised" and settings.ratio < 1) or not supervised:
        return supervised
    return [p for p in where if p <= supervised[-1]] if causal else where


def budget_loop(instances, number, settings, causal):
    n_tokens = len(places(instances, number)[0])
    least = max(settings.min_tokens, round(settings.ratio * n_tokens))
    return min(least, len(candidate_loop(instances, number, settings, causal)))


def top_k_loop(scores, instances, settings, causal):
    """{(row, position): weight} of the kept positions, one instance and one position at a time."""
    kept = {}
    for number in range(instances.count):
        supervised = places(instances, number)[1]
        ranking = candidate_loop(instances, number, settings, causal)
        ranking = sorted(ranking, key=lambda place: -float(scores[place]))  # stable: ties stay in reading order
        chosen = ranking[: budget_loop(instances, number, settings, causal)]
        if supervised and not set(chosen) & set(supervised):
            chosen[-1] = next(place for place in ranking if place in supervised)
        counted = [place for place in chosen if place in supervised]
        for place in chosen:
            weight = 1.0 if settings.token_weight == "none" else len(supervised) / max(1, len(counted))
            kept[place] = weight if place in counted else 0.0
    return kept


def kept_of(selection):
    """{(row, position): weight}, after checking the layout that `TokenSelection` documents."""
    kept = {}
    for row, mask in enumerate(selection.mask.tolist()):
        used = sum(mask)
        assert mask == [True] * used + [False] * (len(mask) - used)
        indices, weights = selection.indices[row].tolist(), selection.weights[row].tolist()
        assert indices[:used] == sorted(set(indices[:used]))
        assert indices[used:] == [0] * (len(mask) - used)
        assert weights[used:] == [0] * (len(mask) - used)
        kept.update({(row, j): w for j, w in zip(indices[:used], weights[:used], strict=True)})
    return kept


def tied_scores(instances):
    """Few different values, so that ties decide; whatever stands at padding must not matter."""
    return torch.randint(0, 4, instances.ids.shape).double().masked_fill(instances.ids < 0, torch.inf)


@each_batch
@pytest.mark.parametrize("select_from", ["all", "supervised"])
@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.3, 0.5, 1.0])
def test_top_k_equals_a_loop_over_instances(batch, select_from, ratio):
    instances = instances_of(batch)
    for min_tokens, token_weight, causal in [(1, "instance", True), (3, "none", True), (2, "instance", False)]:
        settings = config(ratio=ratio, select_from=select_from, min_tokens=min_tokens, token_weight=token_weight)
        scores = tied_scores(instances)
        kept = kept_of(select(scores, instances, settings, causal=causal))
        assert kept == top_k_loop(scores, instances, settings, causal)


@each_batch
@pytest.mark.parametrize("select_from", ["all", "supervised"])
@pytest.mark.parametrize("causal", [True, False])
def test_candidates_are_the_positions_that_can_influence_a_loss(batch, select_from, causal):
    instances = instances_of(batch)
    settings = config(select_from=select_from)
    allowed = candidates(instances, settings, causal=causal)
    expected = set()
    for number in range(instances.count):
        expected |= set(candidate_loop(instances, number, settings, causal))
    assert set(map(tuple, allowed.nonzero().tolist())) == expected


def test_a_prompt_with_the_best_scores_leaves_one_place_to_the_best_supervised_position():
    batch = ragged_batch((20,), n_prompt=12)
    instances = instances_of(batch)
    scores = torch.arange(20, 0, -1.0)[None]
    scores[0, 15] = scores[0, 17] = 9.5  # above the other supervised positions, below the prompt; the earlier one wins
    selection = select(scores, instances, config(ratio=0.2, select_from="all"))
    assert kept_of(selection) == {(0, 0): 0.0, (0, 1): 0.0, (0, 2): 0.0, (0, 15): 8.0}
    assert selection.supervised.tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float64).min])
def test_a_supervised_position_is_kept_even_if_all_of_them_have_the_lowest_score(lowest):
    instances = instances_of(ragged_batch((10,), n_prompt=4))
    scores = torch.zeros(1, 10, dtype=torch.float64)
    scores[0, 3:] = lowest
    kept = kept_of(select(scores, instances, config(ratio=0.3, select_from="all")))
    assert kept == {(0, 0): 0.0, (0, 1): 0.0, (0, 3): 6.0}


def test_nothing_supervised_keeps_nothing():
    instances = instances_of(ragged_batch((4, 7), n_prompt=9))
    for selection in ("topk", "sample"):
        for select_from in ("all", "supervised"):
            settings = config(ratio=1.0, selection=selection, select_from=select_from)
            kept = select(torch.ones(2, 7), instances, settings)
            assert not kept.mask.any()
            assert kept.weights.sum() == 0


@each_batch
def test_weights_of_an_instance_sum_to_its_supervised_positions(batch):
    instances = instances_of(batch)
    kept = kept_of(select(tied_scores(instances), instances, config(ratio=0.3, select_from="all")))
    for number in range(instances.count):
        where, supervised = places(instances, number)
        total = sum(kept.get(place, 0.0) for place in where)
        assert total == pytest.approx(len(supervised), rel=1e-14)


@each_batch
@pytest.mark.parametrize("selection", ["topk", "sample"])
@pytest.mark.parametrize("select_from", ["all", "supervised"])
def test_ratio_one_keeps_every_candidate_and_weights_every_loss_by_one(batch, selection, select_from):
    instances = instances_of(batch)
    settings = config(ratio=1.0, selection=selection, select_from=select_from)
    importance = torch.rand(instances.ids.shape).exp() ** 5
    kept = kept_of(select(importance, instances, settings, step=3))
    for number in range(instances.count):
        supervised = places(instances, number)[1]
        for place in candidate_loop(instances, number, settings, causal=True):
            assert kept.pop(place) == pytest.approx(float(place in supervised), rel=1e-12)
    assert kept == {}


def test_gather_takes_the_kept_positions_of_any_trailing_shape():
    instances = instances_of(ragged_batch((13, 1, 20, 4), left=True, n_prompt=2))
    selection = select(tied_scores(instances), instances, config(ratio=0.3))
    for values in (torch.randn(4, 20), torch.randn(4, 20, 3), torch.randn(4, 20, 2, 5)):
        taken = selection.gather(values)
        assert taken.shape == selection.indices.shape + values.shape[2:]
        for row, indices in enumerate(selection.indices.tolist()):
            for slot, j in enumerate(indices):
                assert torch.equal(taken[row, slot], values[row, j])


# One instance, everywhere it can stand.


def homes(length, n_prompt):
    """(batch, number of the instance in it) for every way a row of this length can be presented."""
    found = {"alone": (ragged_batch((length,), n_prompt=n_prompt), 0)}
    for pad_to in (8, 16, 40):
        for left in (False, True):
            where = {"n_prompt": n_prompt, "left": left, "pad_to": pad_to}
            found[f"padded to {pad_to}, {left=}"] = (ragged_batch((length,), **where), 0)
            found[f"in a batch padded to {pad_to}, {left=}"] = (ragged_batch((3, 19, length, 1, 7), **where), 2)
    found["packed in the middle"] = (packed((4, 19, length, 1, 6), n_prompt), 2)
    found["packed at the end"] = (packed((length + 5, 1, length), n_prompt), 2)
    rows = packed((9, 2 + length), n_prompt), packed((5, length, 6), n_prompt)
    found["packed in the second row"] = (stacked(*rows), 3)
    return found


def content_scores(batch):
    """A score that depends on the token and its place in the document, as computed ones do; garbage at padding."""
    scores = ((batch["input_ids"] * 7919 + batch["position_ids"] * 104729) % 1009).double()
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return scores.masked_fill(mask == 0, 1e9)


def relative(kept, instances, number):
    """[(place within the instance, weight)] of one instance."""
    where = places(instances, number)[0]
    return [(place, kept[position]) for place, position in enumerate(where) if position in kept]


@pytest.mark.parametrize("select_from", ["all", "supervised"])
@pytest.mark.parametrize("rule", ["topk", "sample", "random scores"])
@pytest.mark.parametrize("length", [1, 6, 8, 16])
def test_selection_depends_on_the_instance_alone(length, rule, select_from):
    settings = config(ratio=0.35, select_from=select_from, selection="sample" if rule == "sample" else "topk")
    found = {}
    for name, (batch, number) in homes(length, n_prompt=2).items():
        instances = instances_of(batch)
        scores = random_scores(instances, seed=11, step=5) if rule == "random scores" else content_scores(batch)
        kept = relative(kept_of(select(scores, instances, settings, step=5)), instances, number)
        found[name] = [(place, round(weight, 9)) for place, weight in kept]
    expected_count = 0 if length == 1 else round(0.35 * length)
    assert {name: len(kept) for name, kept in found.items()} == dict.fromkeys(found, expected_count)
    assert found == dict.fromkeys(found, found["alone"])


@pytest.mark.parametrize("length", [1, 8, 16])
def test_draws_and_random_scores_depend_on_the_instance_alone(length):
    draws, scores = {}, {}
    for name, (batch, number) in homes(length, n_prompt=2).items():
        instances = instances_of(batch)
        draws[name] = float(draw(instances.keys, seed=3, step=70)[number])
        values = random_scores(instances, seed=3, step=70)
        scores[name] = [float(values[place]) for place in places(instances, number)[0]]
    assert draws == dict.fromkeys(draws, draws["alone"])
    assert scores == dict.fromkeys(scores, scores["alone"])
    assert len(set(scores["alone"])) == length


def test_random_scores_are_uniform_and_change_with_step_seed_and_instance():
    instances = instances_of(packed(tuple(range(90, 110))))
    total = instances.ids.shape[1]
    found = {(seed, step): random_scores(instances, seed, step)[0] for seed in (0, 1) for step in (0, 1)}
    values = torch.cat(list(found.values()))
    assert len(values.unique()) == 4 * total
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(float(values.mean()) - 1 / 2) < 3 * math.sqrt(1 / 12 / len(values))
    for first, second in [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 1), (1, 1))]:
        correlation = ((found[first] - 1 / 2) * (found[second] - 1 / 2)).mean() * 12
        assert abs(float(correlation)) < 3 / math.sqrt(total)


def test_draws_are_uniform_over_steps_and_differ_between_seeds_and_instances():
    keys = instances_of(packed((5, 9, 7))).keys
    steps = torch.arange(10_000)
    numbers = [draw(key, seed, steps) for key in keys for seed in (0, 1)]
    assert [float(draw(keys, 1, step)[2]) for step in range(50)] == numbers[5][:50].tolist()
    standard_error = math.sqrt(1 / 12 / len(steps))
    for i, first in enumerate(numbers):
        assert abs(float(first.mean()) - 1 / 2) < 3 * standard_error
        for second in numbers[:i]:
            assert not set(first.tolist()) & set(second.tolist())  # not the same sequence from another step on either
            correlation = ((first - 1 / 2) * (second - 1 / 2)).mean() * 12
            assert abs(float(correlation)) < 3 / math.sqrt(len(steps))


# Sampling: the probabilities.


def water_filling(importance, k, uniform_share, forced=None):
    """pi = min(1, k * p), renormalised, by clipping and sharing out the rest until nothing exceeds 1."""
    count, total = len(importance), math.fsum(importance)
    p = [(1 - uniform_share) * w / total + uniform_share / count if total > 0 else 1 / count for w in importance]
    certain = set() if forced is None else {forced}
    while True:
        rest = [j for j in range(count) if j not in certain]
        left, mass = k - len(certain), math.fsum(p[j] for j in rest)
        over = [j for j in rest if left > 0 and left * p[j] >= mass]
        if not over:
            return [1.0 if j in certain else left * p[j] / mass for j in range(count)]
        certain.update(over)


def probability_table(rows, k, uniform_share, forced=None):
    """Call `inclusion_probabilities` with rows of different lengths; what fills the unused slots must not matter."""
    width = max(map(len, rows)) + 2
    table = torch.full((len(rows), width), 55.0, dtype=torch.float64)
    valid = torch.zeros(table.shape, dtype=torch.bool)
    force = torch.zeros(table.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        valid[i, : len(row)] = True
        if forced is not None and forced[i] is not None:
            force[i, forced[i]] = True
    probability = inclusion_probabilities(table, valid, torch.tensor(k), uniform_share, force)
    assert probability.masked_select(~valid).abs().sum() == 0
    return [probability[i, : len(row)].tolist() for i, row in enumerate(rows)]


IMPORTANCES = [
    [1.0],
    [0.0, 0.0, 0.0],
    [5.0, 0.0, 0.0, 1.0],
    [1e-300, 1e-290, 1e-280],
    [1e12, 1.0, 1e-12, 3.0, 1e6, 2.0, 2.0],
    [2.0] * 9,
    [2.0**-i for i in range(20)],
    [float(i % 5) ** 3 for i in range(31)],
]


@pytest.mark.parametrize("uniform_share", [0.05, 0.2, 1.0])
def test_probabilities_equal_iterative_water_filling_and_sum_to_k(uniform_share):
    for forced in (False, True):
        for budget in (1, 2, 3, 5, 11, 100):
            k = [min(budget, len(row)) for row in IMPORTANCES]
            where = [len(row) // 2 for row in IMPORTANCES] if forced else [None] * len(IMPORTANCES)
            found = probability_table(IMPORTANCES, k, uniform_share, where)
            for row, size, place, probability in zip(IMPORTANCES, k, where, found, strict=True):
                assert probability == pytest.approx(water_filling(row, size, uniform_share, place), rel=1e-11)
                assert math.fsum(probability) == pytest.approx(size, abs=1e-12)
                assert all(0 <= pi <= 1 + 1e-12 for pi in probability)
                assert place is None or probability[place] == 1.0


def test_without_a_uniform_share_probabilities_are_proportional_to_importance():
    row = [4.0, 1.0, 2.0, 3.0]
    assert probability_table([row], [1], 0.0)[0] == pytest.approx([0.4, 0.1, 0.2, 0.3], rel=1e-14)
    assert probability_table([row], [2], 0.0)[0] == pytest.approx([0.8, 0.2, 0.4, 0.6], rel=1e-14)
    assert probability_table([row], [3], 0.0)[0] == pytest.approx([1.0, 1 / 3, 2 / 3, 1.0], rel=1e-14)


def test_zero_importance_everywhere_is_drawn_evenly():
    for uniform_share in (0.0, 0.2):
        found = probability_table([[0.0] * 7, [0.0] * 3, [0.0]], [2, 2, 1], uniform_share)
        for probability, expected in zip(found, [[2 / 7] * 7, [2 / 3] * 3, [1.0]], strict=True):
            assert probability == pytest.approx(expected, rel=1e-14)


def test_systematic_sample_keeps_the_stretches_that_contain_a_point():
    for trial in range(200):
        generator = torch.Generator().manual_seed(trial)
        count = int(torch.randint(1, 25, (), generator=generator))
        k = int(torch.randint(0, count + 1, (), generator=generator))
        importance = torch.rand(count, generator=generator, dtype=torch.float64) ** 6
        pi = water_filling(importance.tolist(), k, 0.2)
        start = float(torch.rand((), generator=generator, dtype=torch.float64))
        expected, low = [], 0.0
        for j, width in enumerate(pi):
            if any(low <= start + point < low + width for point in range(k)):
                expected.append(j)
            low += width
        padded = torch.tensor([[*pi, 0.0, 0.0]], dtype=torch.float64)
        kept = systematic_sample(padded, torch.tensor([k]), torch.tensor([start], dtype=torch.float64))
        assert kept[0].nonzero()[:, 0].tolist() == expected
        assert len(expected) == k


@pytest.mark.parametrize("start", [0.0, 0.5, 1 - 2.0**-53])
def test_systematic_sample_keeps_exactly_k_at_the_ends_of_the_draw(start):
    for count in range(1, 40):
        for k in range(count + 1):
            even = torch.full((1, count), k / count, dtype=torch.float64)
            kept = systematic_sample(even, torch.tensor([k]), torch.tensor([start], dtype=torch.float64))
            assert int(kept.sum()) == k


# Sampling: 10,000 draws of a toy batch.

STEPS = 10_000
TOY = packed((9, 6, 1, 12), n_prompt=3)
TOY["labels"][0, -2:] = -100  # the last document ends in positions that carry no loss
RATIO = 0.35  # keeps 3, 2, 0 and 4 tokens


@pytest.fixture(scope="module", params=["supervised", "all"])
def draws(request):
    """Steps 0 to 9,999 of one batch at once, as rows of one batch with a step each."""
    torch.manual_seed(0)
    settings = config(ratio=RATIO, selection="sample", select_from=request.param)
    importance = torch.randn(TOY["input_ids"].shape, dtype=torch.float64).mul(2).exp()  # heavy tails: some are certain
    instances = instances_of(TOY)
    many = instances_of({name: value.expand(STEPS, -1) for name, value in TOY.items()})
    step = torch.arange(STEPS).repeat_interleave(instances.count)
    selection = select(importance.expand(STEPS, -1), many, settings, step=step)
    shape = (STEPS, importance.shape[1])
    kept = torch.zeros(shape, dtype=torch.int64).scatter_add(1, selection.indices, selection.mask.long())
    weights = torch.zeros(shape, dtype=torch.float64).scatter_add(1, selection.indices, selection.weights)
    return SimpleNamespace(instances=instances, settings=settings, importance=importance, kept=kept, weights=weights)


def toy_probabilities(draws):
    """(n,) inclusion probability of each position, and the positions kept for certain by the supervised rule."""
    probability, forced = torch.zeros(TOY["input_ids"].shape[1], dtype=torch.float64), []
    for number in range(draws.instances.count):
        allowed = candidate_loop(draws.instances, number, draws.settings, causal=True)
        if not allowed:
            continue
        importance = [float(draws.importance[place]) for place in allowed]
        best = None
        if draws.settings.select_from == "all":
            supervised = places(draws.instances, number)[1]
            best = allowed.index(max(supervised, key=lambda place: float(draws.importance[place])))
            forced.append(allowed[best][1])
        k = budget_loop(draws.instances, number, draws.settings, causal=True)
        found = water_filling(importance, k, draws.settings.uniform_share, best)
        for (_, j), pi in zip(allowed, found, strict=True):
            probability[j] = pi
    return probability, forced


def sigmas(count):
    """The bound, in standard errors, that `count` numbers exceed as rarely as one exceeds three (Bonferroni)."""
    return NormalDist().inv_cdf(1 - (1 - NormalDist().cdf(3)) / count)


def test_rows_of_the_toy_batch_are_the_selections_of_single_steps(draws):
    for step in range(0, STEPS, 401):
        kept = kept_of(select(draws.importance, draws.instances, draws.settings, step=step))
        assert {j for _, j in kept} == set(draws.kept[step].nonzero()[:, 0].tolist())
        assert all(
            float(draws.weights[step, j]) == pytest.approx(weight, rel=1e-12) for (_, j), weight in kept.items()
        )


def test_every_draw_keeps_exactly_k_positions_of_every_instance(draws):
    expected = [budget_loop(draws.instances, number, draws.settings, causal=True) for number in range(4)]
    assert expected == [3, 2, 0, 4]
    for number, k in enumerate(expected):
        of_instance = draws.kept[:, draws.instances.ids[0] == number]
        assert of_instance.sum(1).unique().tolist() == [k]
    assert draws.kept.max() == 1


def test_inclusion_frequencies_equal_the_probabilities(draws):
    probability, _ = toy_probabilities(draws)
    frequency = draws.kept.double().mean(0)
    uncertain = (probability > 0) & (probability < 1)
    assert uncertain.sum() >= 8
    assert torch.equal(frequency[~uncertain], probability[~uncertain])
    standard_error = (probability * (1 - probability) / STEPS).sqrt()
    z = (frequency - probability)[uncertain] / standard_error[uncertain]
    assert z.abs().max() < sigmas(int(uncertain.sum()))


def test_each_kept_loss_is_weighted_by_the_inverse_of_its_probability(draws):
    probability, _ = toy_probabilities(draws)
    supervised = draws.instances.supervised[0]
    expected = torch.where(supervised, 1 / probability, 0.0)
    assert torch.allclose(draws.weights, draws.kept * expected, rtol=1e-12, atol=0)


def test_mean_loss_and_gradient_over_the_draws_are_the_full_ones(draws):
    logits = torch.randn(TOY["input_ids"].shape[1], 7, dtype=torch.float64, requires_grad=True)
    targets = torch.where(draws.instances.supervised[0], draws.instances.targets[0] % 7, -100)
    losses = cross_entropy(logits, targets, reduction="none")
    full = losses.sum()
    (full_gradient,) = torch.autograd.grad(full, logits, retain_graph=True)

    drawn = draws.weights @ losses.detach()
    loss_error = drawn.std() / math.sqrt(STEPS)
    assert loss_error > 0
    assert abs(drawn.mean() - full.detach()) < 3 * loss_error

    (mean_gradient,) = torch.autograd.grad((draws.weights.mean(0) * losses).sum(), logits)
    # A position's loss is weighted by 1/pi with probability pi, so its gradient g has variance g^2 (1 - pi) / pi.
    probability = toy_probabilities(draws)[0][:, None].expand_as(logits)
    error = full_gradient.abs() * ((1 - probability) / probability.clamp(min=1e-9) / STEPS).sqrt()
    certain = (probability == 1) | (full_gradient == 0)
    assert torch.allclose(mean_gradient[certain], full_gradient[certain], rtol=1e-9, atol=0)
    z = ((mean_gradient - full_gradient) / error)[~certain]
    # The 7 coordinates of one position are multiples of one random number, so only the positions count.
    assert z.abs().max() < sigmas(len(z) // 7)


def test_joint_sampling_always_keeps_the_best_supervised_position_with_weight_one(draws):
    _, forced = toy_probabilities(draws)
    if draws.settings.select_from == "supervised":
        assert forced == []
        return
    assert len(forced) == 3
    assert draws.kept[:, forced].min() == 1
    assert torch.equal(draws.weights[:, forced], torch.ones(STEPS, 3, dtype=torch.float64))


def test_literal_weights_count_each_sampled_token_once():
    instances = instances_of(TOY)
    importance = torch.rand(TOY["input_ids"].shape)
    for select_from in ("all", "supervised"):
        settings = config(ratio=RATIO, selection="sample", select_from=select_from, token_weight="none")
        kept = kept_of(select(importance, instances, settings))
        assert len(kept) == 9
        assert kept == {(row, j): float(instances.supervised[row, j]) for row, j in kept}


def test_zero_scores_still_draw_k_positions_evenly():
    instances = instances_of(TOY)
    settings = config(ratio=RATIO, selection="sample")
    kept = kept_of(select(torch.zeros(TOY["input_ids"].shape), instances, settings, step=9))
    for number, k in enumerate([3, 2, 0, 4]):
        supervised = places(instances, number)[1]
        weights = [kept[place] for place in supervised if place in kept]
        assert weights == pytest.approx([len(supervised) / k] * k if k else [], rel=1e-12)


# Positions given by the user.


def test_given_positions_are_kept_in_ascending_order_with_instance_weights():
    batch = stacked(packed((6, 8), n_prompt=2), packed((1, 13), n_prompt=2))
    instances = instances_of(batch)
    for dtype in (torch.int64, torch.int32):
        given = torch.tensor([[9, 0, 3, -1], [-1, 13, 12, 2]], dtype=dtype)
        kept = kept_of(select_given(given, instances, config(selection="sample")))
        # Supervised: 1 to 4 of document 0 (5 is its last), 7 to 12 of document 1, 2 to 12 of document 3.
        assert kept == {(0, 0): 0.0, (0, 3): 4.0, (0, 9): 6.0, (1, 2): 5.5, (1, 12): 5.5, (1, 13): 0.0}
        literal = kept_of(select_given(given, instances, config(token_weight="none")))
        assert literal == {place: float(weight > 0) for place, weight in kept.items()}


def test_a_row_may_be_given_nothing():
    instances = instances_of(ragged_batch((4, 6), left=True))
    assert kept_of(select_given(torch.tensor([[-1, -1], [2, 5]]), instances, config())) == {(1, 2): 5.0, (1, 5): 0.0}
    assert kept_of(select_given(torch.full((2, 1), -1), instances, config())) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0, 1], [3, 12]], "token_indices of row 1 hold 12, but the row has positions 0 to 8."),
        ([[9, 1], [3, 4]], "token_indices of row 0 hold 9, but the row has positions 0 to 8."),
        ([[0, 1], [-2, 4]], "token_indices of row 1 hold -2, but the row has positions 0 to 8."),
        ([[0, 1], [5, 5]], "token_indices of row 1 name position 5 twice."),
        ([[0, 7], [5, 6]], "token_indices of row 0 name position 7 although it is padding."),
        ([[0.0, 1.0], [2.0, 3.0]], "token_indices must be integers, got torch.float32."),
        ([[True, False], [True, True]], "token_indices must be integers, got torch.bool."),
    ],
)
def test_bad_given_positions_are_refused_with_row_and_value(given, message):
    instances = instances_of(ragged_batch((5, 9)))
    with pytest.raises(InputError) as caught:
        select_given(torch.tensor(given), instances, config())
    assert str(caught.value) == message
