"Chapter 52a: patches do not depend on later bytes, incremental is batch, the network is causal over patches"
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from helpers import proves
from specref.serve import byte_latent
from specref.serve.byte_latent import (BOS, ByteLatent, ByteModel, ByteRecipe, Patcher, PatchRule,
                                       block_logits, byte_bits, byte_ids, hashed_grams,
                                       latest_patch, row_entropy, train_bytes)

RULES = [PatchRule(1.2), PatchRule(rise=.1), PatchRule(1., .05), PatchRule(1.2, most=3),
         PatchRule(9., most=2)]
rules = st.sampled_from(RULES)
entropies = st.lists(st.floats(0, 5.5), min_size=1, max_size=12).map(torch.tensor)


@given(rules, entropies)
def test_starts_by_their_definition(rule, h):
    wanted, length = [True, True], 1
    for before, now in zip(h.tolist(), h.tolist()[1:]):
        over = rule.threshold is None or now > rule.threshold
        risen = rule.rise is None or now - before > rule.rise
        wanted.append(bool(over and risen or length == rule.most))
        length = 1 if wanted[-1] else length + 1
    assert rule.starts(h.double()).tolist() == wanted


@proves("thm-incremental")
@given(rules, entropies, st.integers(1, 12))
def test_later_bytes_move_no_start(rule, h, n):
    n = min(n, len(h))
    assert torch.equal(rule.starts(h[:n]), rule.starts(h)[:n+1])


@pytest.mark.parametrize("wrong", [
    lambda h: torch.cat([h[1:], h[-1:]]),   # the entropy after the byte: it reads the byte
    lambda h: 2.*(h >= h.sort(descending=True).values[len(h) // 4]),   # the largest quarter of all
])
def test_rules_that_read_later_bytes_move_starts(wrong):
    rule, moved, gen = PatchRule(1.), 0, torch.Generator().manual_seed(0)
    for _ in range(20):
        h = 3*torch.rand(12, generator=gen)
        moved += not torch.equal(rule.starts(wrong(h[:8])), rule.starts(wrong(h))[:9])
    assert moved > 5


@proves("prop-threshold")
@given(entropies, st.floats(0, 5), st.floats(0, 5))
def test_a_higher_threshold_adds_no_start(h, a, b):
    low, high = (PatchRule(x).starts(h) for x in sorted((a, b)))
    assert not (high & ~low).any()


def small(make, seed=0, **sizes):
    torch.manual_seed(seed)
    net = make(**sizes).double().eval()
    for w in net.parameters(): nn.init.normal_(w, std=.3)
    return net


MODEL = small(ByteModel, layers=1, d=32, window=8)
NET = small(ByteLatent, d=32, layers=(1, 2, 2), rows=64, window=8, block=4)
texts = st.lists(st.integers(0, 255), min_size=1, max_size=30).map(tuple)


def in_one_pass(text, rule):
    with torch.inference_mode(): z = MODEL(torch.tensor([(BOS, *text)]))[0]
    return rule.starts(row_entropy(z)).tolist()


@proves("thm-incremental")
@given(st.lists(texts, min_size=1, max_size=4), st.sampled_from([PatchRule(4.), PatchRule(rise=0.)]))
@settings(max_examples=25)
def test_the_patcher_is_the_pass_over_all(some, rule):
    patcher = Patcher(MODEL, rule)
    for text in some:
        for part in (text, text[:len(text)//2], (*text, 7)):
            assert patcher(part) == in_one_pass(part, rule)


@given(texts, st.integers(3, 8))
def test_hashed_grams_read_the_last_bytes(text, size):
    x = torch.tensor([text])
    found = hashed_grams(x, size, 97)
    for i in range(len(text)):
        alone = torch.tensor([text[max(0, i+1-size):i+1]])
        assert found[0, i] == hashed_grams(alone, size, 97)[0, -1] and 0 <= found[0, i] < 97
    other = hashed_grams(torch.cat([x + 1, x], 1), size, 2**40)[0]
    assert len(text) < size or other[len(text) + size - 1] == hashed_grams(x, size, 2**40)[0, size - 1]


def patches_at(*places, n=20): return torch.tensor([[i < 2 or i in places for i in range(n + 1)]])

def test_which_patch_a_byte_reads():
    "begin | b1 b2 b3 | b4 b5 | ...: b3 predicts the first byte of the next patch and reads its own"
    assert latest_patch(patches_at(4, 6, n=7)).tolist() == [[0, 0, 0, 1, 1, 2, 2]]


def rows_of(net, x, starts):
    with torch.inference_mode(): return net(x, starts)[0]

BYTES = torch.tensor([[BOS, *np.random.default_rng(1).integers(256, size=19)]])
STARTS = patches_at(4, 6, 9, 13, 17)

@proves("thm-patch-causal")
@pytest.mark.parametrize("i", [1, 5, 8, 9, 12, 16])
def test_a_row_depends_on_no_later_byte(i):
    changed, starts = BYTES.clone(), STARTS.clone()
    changed[0, i] = (changed[0, i] + 99) % 256
    starts[0, i+2:] = patches_at(i + 3)[0, i+2:]   # the later starts may change with it
    before, after = rows_of(NET, BYTES, STARTS), rows_of(NET, changed, starts)
    same = (before == after).all(-1)
    assert same[:i].all() and not same[i]


def test_reading_ones_own_patch_is_not_causal(monkeypatch):
    monkeypatch.setattr(byte_latent, "latest_patch", lambda starts: starts.long().cumsum(1)[:, :-1] - 1)
    changed = BYTES.clone()
    changed[0, 11] = (changed[0, 11] + 99) % 256   # inside of the patch 9 .. 12
    same = (rows_of(NET, BYTES, STARTS) == rows_of(NET, changed, STARTS)).all(-1)
    assert not same[9:11].any()


def test_the_latent_transformer_reads_further_than_the_window():
    "Byte 2 is out of the window of all local layers, in one patch with byte 3"
    changed = BYTES.clone()
    changed[0, 1] = (changed[0, 1] + 99) % 256
    far = patches_at(4)   # two patches in all: nothing is read after the second
    many, one = ((rows_of(NET, BYTES, s) - rows_of(NET, changed, s)).abs().amax(-1) for s in (STARTS, far))
    assert many[18] > 1e-6 and one[3] > 1e-6
    local = small(ByteLatent, d=32, layers=(1, 2, 1), rows=64, window=2, block=4)
    local.spread.weight.data.zero_()   # nothing comes from the patches
    same = (rows_of(local, BYTES, STARTS) == rows_of(local, changed, STARTS)).all(-1)
    assert same[12:].all()


def test_a_patch_has_its_own_bytes_alone():
    h, ids = torch.randn(1, 10, 32, dtype=torch.double), torch.tensor([[0, 1, 1, 1, 2, 2, 3, 3, 3, 3]])
    with torch.inference_mode():
        rows = NET.patch(h, ids, 3)
        for j in range(3):
            noisy = torch.where((ids == j)[..., None], h, 7*torch.randn_like(h))
            assert torch.allclose(NET.patch(noisy, ids, 3)[:, j], rows[:, j], atol=1e-12)
            assert not torch.allclose(NET.patch(h + (ids == j)[..., None], ids, 3)[:, j], rows[:, j])
        padded = NET.patch(h, ids, 6)
    assert torch.allclose(padded[:, :3], rows) and padded.isfinite().all()


def block_of(x, hidden, cut=9):
    with torch.inference_mode():
        return block_logits(NET, x, STARTS, torch.tensor([[cut]]), torch.tensor([hidden]))

def test_blocks_read_the_text_before_and_their_shown_bytes():
    hidden = [True, False, True, True]
    text, block = block_of(BYTES, hidden)
    assert (text[0] - rows_of(NET, BYTES, STARTS)).abs().max() < 1e-12
    def changes(i):
        x = BYTES.clone()
        x[0, i] = (x[0, i] + 99) % 256
        return ((block_of(x, hidden)[1] - block).abs().amax(-1) > 1e-9)[0].tolist()
    assert changes(10) == changes(12) == changes(13) == [False]*4   # hidden ones
    assert changes(15) == [False]*4                                 # behind the block
    assert changes(11) == changes(9) == [True]*4                    # shown: both directions


def test_trains_resumes_and_stores(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_latent, "corpus", lambda: [
        dict(domain=d, held_out=False, text="some text of the domain " * 20) for d in ("english", "code")])
    byte_ids.cache_clear()
    sizes = dict(entropy_steps=2, steps=2, rows=2, length=48, cuts=2)
    train_bytes(tmp_path, ByteRecipe(**sizes))
    assert (tmp_path/"data"/"bytes"/"recipe.json").exists()
    first = (tmp_path/"data"/"bytes"/"model.safetensors").read_bytes()
    (tmp_path/"data"/"bytes"/"model.safetensors").unlink()
    train_bytes(tmp_path, ByteRecipe(**sizes))   # both are complete: nothing is trained again
    assert (tmp_path/"data"/"bytes"/"model.safetensors").read_bytes() == first
    byte_ids.cache_clear()


def test_stored_networks_are_small_and_better_than_the_byte_model():
    from specref.models.embedded import stored
    from specref.serve.byte_latent import byte_latent_rows, byte_model_rows
    assert stored("bytes/model.safetensors").stat().st_size < 8e6
    text = tuple(byte_ids("code")[:1500].tolist())
    assert byte_bits(byte_latent_rows, text) < byte_bits(byte_model_rows, text) < 2.5


def test_a_batch_is_each_text():
    "Texts of fewer patches are padded with patches without bytes, which no row reads"
    x = torch.cat([BYTES, (BYTES + 5) % 256])
    x[:, 0], starts = BOS, torch.cat([STARTS, patches_at(7)])
    with torch.inference_mode(): both = NET(x, starts)
    for i in range(2): assert (both[i] - rows_of(NET, x[i:i+1], starts[i:i+1])).abs().max() < 1e-12


def test_a_patch_begins_as_the_largest_numbers_of_its_bytes():
    h, ids = torch.randn(2, 7, 3), torch.tensor([[0, 1, 1, 1, 2, 2, 3], [0, 1, 1, 2, 2, 2, 2]])
    found = byte_latent.largest_of_patch(h, ids, 3)
    for i in range(2):
        for k in range(3): assert torch.equal(found[i, k], h[i, ids[i] == k].max(0).values)
    assert not byte_latent.largest_of_patch(h, ids.clamp(max=1), 3)[:, 2].any()
