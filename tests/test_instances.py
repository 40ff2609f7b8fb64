import itertools
import math

import pytest
import torch

from tokenseek_trainer.errors import InputError
from tokenseek_trainer.instances import find_instances, mix, uniform
from tokenseek_trainer.testing import packed_batch, ragged_batch


MASK_64 = 2**64 - 1


def documents(batch):
    """The definition in plain Python: for each document its row and its positions."""
    found = []
    for row in range(len(batch["input_ids"])):
        real = range(batch["input_ids"].shape[1])
        if "attention_mask" in batch:
            real = [j for j in real if batch["attention_mask"][row, j]]
            found.append((row, list(real)))
            continue
        places = batch["position_ids"][row].tolist() if "position_ids" in batch else list(real)
        for j in real:
            if j == 0 or places[j] != places[j - 1] + 1:
                found.append((row, []))
            found[-1][1].append(j)
    return found


def without(batch, *names):
    return {name: value for name, value in batch.items() if name not in names}


def all_masked():
    batch = ragged_batch((3, 5))
    batch["labels"][:] = -100
    return batch


def holed_labels():
    batch = ragged_batch((9, 6), left=True)
    batch["labels"][:, ::3] = -100
    return batch


def two_packed_rows():
    rows = packed_batch((1, 5, 7)), packed_batch((8, 4, 1), seed=1)
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def empty_row():
    batch = ragged_batch((4, 6, 3), left=True)
    for name, nothing in (("attention_mask", 0), ("labels", -100)):
        batch[name][1] = nothing
    return batch


BATCHES = {
    "ragged": ragged_batch((4, 1, 6, 12)),
    "left": ragged_batch((4, 1, 6, 12), left=True),
    "padded to 16": ragged_batch((5, 9), pad_to=16),
    "one token": ragged_batch((1,)),
    "all labels masked": all_masked(),
    "holes in the labels": holed_labels(),
    "packed": packed_batch((1, 5, 1, 8)),
    "two packed rows": two_packed_rows(),
    "no mask, no positions": without(ragged_batch((7, 7)), "attention_mask", "position_ids"),
    "a row of padding only": empty_row(),
}
each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


@each_batch
def test_ids_number_the_documents_in_reading_order(batch):
    instances = find_instances(batch, batch["labels"], shift=True)
    expected = torch.full_like(batch["input_ids"], -1)
    for number, (row, positions) in enumerate(documents(batch)):
        for j in positions:
            expected[row, j] = number
    assert instances.ids.tolist() == expected.tolist()
    assert instances.count == len(documents(batch))


@each_batch
def test_position_ids_count_each_document_from_zero_and_are_zero_at_padding(batch):
    expected = torch.zeros_like(batch["input_ids"])
    for row, positions in documents(batch):
        for place, j in enumerate(positions):
            expected[row, j] = place
    for inputs in (batch, without(batch, "position_ids") if "attention_mask" in batch else batch):
        instances = find_instances(inputs, batch["labels"], shift=True)
        assert instances.position_ids.tolist() == expected.tolist()


@each_batch
@pytest.mark.parametrize("shift", [True, False])
def test_targets_and_counts_match_a_loop(batch, shift):
    instances = find_instances(batch, batch["labels"], shift=shift)
    n = batch["labels"].shape[1]
    expected = torch.full_like(batch["labels"], -100)
    for row, positions in documents(batch):
        for j in positions:
            if j + shift < n:
                expected[row, j] = batch["labels"][row, j + shift]
    assert instances.targets.tolist() == expected.tolist()
    assert instances.supervised.tolist() == [[t != -100 for t in row] for row in expected.tolist()]
    for number, (row, positions) in enumerate(documents(batch)):
        supervised = [j for j in positions if expected[row, j] != -100]
        assert instances.n_tokens[number] == len(positions)
        assert instances.n_supervised[number] == len(supervised)
        assert instances.last_supervised()[number] == (supervised[-1] if supervised else -1)


def test_last_pad_on_the_left_predicts_nothing_even_if_the_first_token_has_a_label():
    batch = ragged_batch((3, 6), left=True)
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    instances = find_instances(batch, batch["labels"], shift=True)
    assert instances.targets[0].tolist() == [-100] * 3 + batch["input_ids"][0, 4:].tolist() + [-100]
    assert instances.n_supervised.tolist() == [2, 5]


def test_without_labels_nothing_is_supervised():
    batch = ragged_batch((2, 5))
    instances = find_instances(batch, None, shift=True)
    assert (instances.targets == -100).all()
    assert instances.n_supervised.tolist() == [0, 0]
    assert instances.n_tokens.tolist() == [2, 5]


def test_an_attention_mask_keeps_a_row_one_instance_although_positions_restart():
    batch = packed_batch((3, 4))
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    instances = find_instances(batch, batch["labels"], shift=True)
    assert instances.ids.tolist() == [[0] * 7]
    assert instances.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]


def test_one_row_of_position_ids_serves_every_row():
    batch = without(ragged_batch((5, 5, 5)), "attention_mask")
    batch["position_ids"] = torch.tensor([[0, 1, 0, 1, 2]])
    instances = find_instances(batch, batch["labels"], shift=True)
    assert instances.ids.tolist() == [[0, 0, 1, 1, 1], [2, 2, 3, 3, 3], [4, 4, 5, 5, 5]]
    assert instances.position_ids.tolist() == [[0, 1, 0, 1, 2]] * 3


def test_position_ids_that_start_above_zero_do_not_split_the_row():
    batch = without(ragged_batch((4,)), "attention_mask")
    batch["position_ids"] = torch.tensor([[7, 8, 9, 10]])
    instances = find_instances(batch, batch["labels"], shift=True)
    assert instances.ids.tolist() == [[0, 0, 0, 0]]
    assert instances.position_ids.tolist() == [[7, 8, 9, 10]]


def test_embeddings_take_the_place_of_tokens():
    batch = ragged_batch((3, 6), left=True)
    embedded = {"inputs_embeds": torch.randn(2, 6, 4), "attention_mask": batch["attention_mask"]}
    ours = find_instances(embedded, batch["labels"], shift=True)
    theirs = find_instances(batch, batch["labels"], shift=True)
    for name in ("ids", "position_ids", "targets", "n_tokens", "n_supervised"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.keys[0] != ours.keys[1]


def key_of(batch, which=0):
    return int(find_instances(batch, batch["labels"], shift=True).keys[which])


@pytest.mark.parametrize("length", [1, 2, 7, 8])
@pytest.mark.parametrize("mask", ["with mask", "without mask"])
def test_key_of_a_row_is_the_same_wherever_it_stands(length, mask):
    alone = key_of(ragged_batch((length,)))
    if mask == "without mask":
        bare = without(ragged_batch((length,)), "attention_mask", "position_ids")
        packed = packed_batch((5, length, 3, length))
        assert [key_of(bare), key_of(packed, 1), key_of(packed, 3)] == [alone] * 3
        return
    for pad_to in (8, 16):
        for left in (False, True):
            assert key_of(ragged_batch((length,), pad_to=pad_to, left=left)) == alone
            batch = ragged_batch((12, length, 3, length), pad_to=pad_to, left=left)
            assert [key_of(batch, 1), key_of(batch, 3)] == [alone, alone]


def test_keys_differ_between_rows_permutations_and_prefixes():
    tokens = [5, 9, 9, 2, 5, 7]
    others = [tokens[:-1], [*tokens, 0], tokens[::-1], [9, 5, *tokens[2:]], [6, *tokens[1:]], [9, 5, 2, 9, 5, 7]]
    keys = []
    for row in (tokens, *others):
        input_ids = torch.tensor([row])
        keys.append(key_of({"input_ids": input_ids, "labels": input_ids}))
    assert len(set(keys)) == 1 + len(others)


def test_keys_of_many_short_rows_do_not_collide():
    input_ids = torch.tensor([[a, b] for a in range(100) for b in range(100)])
    instances = find_instances({"input_ids": input_ids}, None, shift=True)
    assert len(set(instances.keys.tolist())) == 10_000


def splitmix64(x):
    """Steele, Lea and Flood (2014), on unsigned Python integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


HARD_INTEGERS = [0, 1, -1, 2**63 - 1, -(2**63), 12345, -98765, 2**62 + 3]


def test_mix_is_splitmix64():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # first output of the reference generator with seed 0
    hashed = mix(torch.tensor(HARD_INTEGERS))
    assert [h & MASK_64 for h in hashed.tolist()] == [splitmix64(x & MASK_64) for x in HARD_INTEGERS]


def test_uniform_is_the_top_53_bits_of_the_hash():
    expected = [(splitmix64(x & MASK_64) >> 11) / 2**53 for x in HARD_INTEGERS]
    assert uniform(torch.tensor(HARD_INTEGERS)).tolist() == expected


@pytest.mark.parametrize("origin", [0, -5_000, 2**62])
def test_uniform_numbers_look_uniform(origin):
    count, n_bins = 10_000, 100
    numbers = uniform(mix(torch.arange(count) + origin)).tolist()
    assert all(0 <= u < 1 for u in numbers)
    mean = sum(numbers) / count
    assert abs(mean - 1 / 2) < 3 * math.sqrt(1 / 12 / count)
    # (u - 1/2)^2 has mean 1/12 and variance 1/80 - 1/144 = 1/180.
    variance = sum((u - 1 / 2) ** 2 for u in numbers) / count
    assert abs(variance - 1 / 12) < 3 * math.sqrt(1 / 180 / count)
    bins = [0] * n_bins
    for u in numbers:
        bins[int(u * n_bins)] += 1
    expected = count / n_bins
    chi_square = sum((b - expected) ** 2 / expected for b in bins)
    # 99 degrees of freedom: mean 99, variance 198. Far below is as suspicious as far above.
    assert abs(chi_square - 99) < 3 * math.sqrt(198)
    # Neighbours are independent: the correlation of consecutive numbers has standard error 1/sqrt(count).
    products = sum((a - 1 / 2) * (b - 1 / 2) for a, b in itertools.pairwise(numbers)) / count
    assert abs(products * 12) < 3 / math.sqrt(count)


def test_inputs_without_tokens_are_refused_with_what_there_is():
    with pytest.raises(InputError, match="needs input_ids or inputs_embeds; it has: attention_mask, labels"):
        find_instances({"labels": torch.zeros(1, 2), "attention_mask": torch.ones(1, 2)}, None, shift=True)
    with pytest.raises(InputError, match="it has: nothing"):
        find_instances({}, None, shift=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.zeros(6, dtype=torch.long)}, r"input_ids must have shape \(batch, tokens\), got \(6,\)"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask has shape \(2, 5\), input_ids \(2, 6\)"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"\(2, 1, 6, 6\).*not supported: pass the \(batch, tokens\) one"),
        ({"position_ids": torch.zeros(2, 5)}, r"position_ids must have shape \(2, 6\), got \(2, 5\)"),
        ({"position_ids": torch.zeros(3, 6)}, r"position_ids must have shape \(2, 6\), got \(3, 6\)"),
        ({"position_ids": torch.zeros(6)}, r"position_ids must have shape \(2, 6\), got \(6,\)"),
        ({"labels": torch.zeros(2, 7)}, r"labels must have shape \(2, 6\) like input_ids, got \(2, 7\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_both_shapes(change, message):
    batch = {**ragged_batch((6, 4)), **change}
    with pytest.raises(InputError, match=message):
        find_instances(batch, batch["labels"], shift=True)
