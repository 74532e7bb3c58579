"Chapter 52b: drafts inside the patch are accepted, drafts past it are verified; a cache is the whole pass"
from dataclasses import replace

import numpy as np, pytest, torch
from hypothesis import strategies as st

from helpers import examples, faithful, proves, seeds
from published import having
from specref import (autoregressive, exact, generate, loop_law, random_table, reject, rounds, Seeded,
                     target_law, Tree, tv_outcomes)
from specref.bytes.latent import BOS, ByteLatent, ByteModel, Patcher, PatchRule, block_logits, latest_patch
from specref.bytes.patches import (ByteTarget, HiddenBlockDraft, LocalDraft, PatchEnd, PatchReading,
                                   PatchTable, blt_dv, blt_s)
from specref.core.target import Meter
from specref.draft.length import ConstantLength, ScheduledChain
from test_byte_latent import small

MODEL = small(ByteModel, layers=1, d=32, window=8)
NET = small(ByteLatent, d=32, layers=(1, 2, 2), rows=64, window=8, block=4)
RULE = PatchRule(rise=0.)

def random_patches(seed, V=3):
    "A table whose rows depend on the text and on where the patches that it has read lie"
    def ends(text): return np.random.default_rng([seed, 7, *text[-2:]]).random() < .4
    def f(text, patches):
        key = [seed, *(x + 1 for x in text), 0, *map(len, patches)]
        return exact(*map(int, np.random.default_rng(key).choice([1, 2, 3, 5, 9], V)))
    return PatchTable(V, ends, f)

def chain(table, beyond, most=3, draft=LocalDraft):
    return ScheduledChain(draft(table), PatchEnd(table.patcher, beyond), most)

@proves("thm-inside", "def-local")
@examples(12, seeds, st.integers(0, 3))
def test_the_distribution_is_that_of_the_model(seed, beyond):
    table = random_patches(seed)
    assert loop_law(table, chain(table, beyond), reject, (0, 1), 3) == target_law(table, (0, 1), 3)

@proves("thm-inside")
@examples(30, seeds, seeds)
def test_plain_decoding_has_a_round_for_each_patch(seed, draws):
    table, ctx = random_patches(seed), (0, 1)
    run = rounds(table, chain(table, 0, most=50), reject, ctx, Seeded(draws))
    for _ in range(6):
        round = next(run)
        assert round.verdict.node == len(round.tree) - 1   # all were accepted
        before, ctx = ctx, ctx + round.tokens
        assert table.patcher(ctx[:-1])[-1] or len(round.tree) > 50   # the emitted token begins a patch
        assert not any(table.patcher(ctx[:-1])[len(before) + 1:-1])   # and none before it does

@faithful("BLT-S", part="specref.bytes.patches.LocalDraft", plain={
    "the model itself": lambda table: table, "another model": lambda table: random_table(3, 1)})
def test_rows_differ_past_the_patch_alone(subject):
    same = dict.fromkeys((True, False), 0)
    for seed in range(20):
        table, ctx = random_patches(seed), (0, 1)
        inside = table.patches(ctx) == table.patches(ctx[:-1])
        same[inside] += (table(Tree(ctx))[0] == subject(table)(Tree(ctx))[0]).all()
        assert not inside or same[True]
    assert same[True] > 4 and not same[False]

class Outdated(PatchTable):
    "Verifies with the patches of the draft"
    def __call__(self, tree): return self.local(tree, self.meter)

class MisstatedDraft(LocalDraft):
    "Draws from the local decoder and states the model's own rows"
    def __call__(self, tree): return self.target(tree)

@pytest.mark.parametrize("wrong", ["target", "stated"])
def test_mutants_have_another_distribution(wrong):
    found = []
    for seed in range(6):
        right = random_patches(seed)
        table = Outdated(right.V, right.ends, right.f) if wrong == "target" else right
        drafter = chain(table, 2)
        if wrong == "stated":
            def drafter(ctx, rng, drawn=chain(table, 2), own=MisstatedDraft(table)):
                tree = drawn(ctx, rng)
                rows, new = own(tree), Tree(ctx)
                for i in range(1, len(tree)): new.add(i - 1, tree.token[i], rows[i-1])
                return new
        found.append(tv_outcomes(loop_law(table, drafter, reject, (0, 1), 3), target_law(right, (0, 1), 3)))
    assert max(found) > .02

def test_a_draft_ends_where_it_is_said():
    def f(text, patches): return exact(1, 0) if len(text) < 5 else exact(0, 1)
    table = PatchTable(2, lambda text: text[-1] == 1, f)
    lengths = [len(chain(table, beyond, most=9)((1, 0), Seeded(0))) - 1 for beyond in (0, 1, 3)]
    assert lengths == [4, 5, 7]   # 0 0 0 1, and past it 1 ...
    assert len(chain(table, 0)((0, 1), Seeded(0))) == 1   # the next byte begins a patch

# The network

def patcher(): return Patcher(MODEL, RULE)
def whole(text):
    with torch.inference_mode(): return NET(torch.tensor([(BOS, *text)]), torch.tensor([patcher()(text)]))[0]
TEXT = tuple(b"a text that is long enough to have some patches in it")

steps = st.tuples(st.integers(0, 40), st.lists(st.integers(0, 255), max_size=4))

@examples(15, st.lists(steps, min_size=1, max_size=5))
def test_the_cache_is_the_pass_over_all(steps):
    reading, meter = PatchReading(NET, patcher()), Meter()
    for keep, more in steps:
        text = (*TEXT[:keep], *more)
        assert (reading.turn(text, meter) - whole(text)).abs().max() < 1e-12
        assert (reading.copy().turn((*text, 9), Meter(), local=True)[:-1] - whole(text)).abs().max() < 1e-12

def test_a_crop_that_keeps_patches_is_found(monkeypatch):
    "The mutant: patches that were complete because of rejected bytes stay"
    def crop(self, n, starts): self.x, self.encoder.n, self.decoder.n = self.x[:n], n, n
    monkeypatch.setattr(PatchReading, "crop", crop)
    reading, meter = PatchReading(NET, patcher()), Meter()
    reading.turn((*TEXT[:20], 3, 200, 7, 99, 15, 80), meter)
    assert (reading.turn(TEXT[:30], meter) - whole(TEXT[:30])).abs().max() > 1e-6

def test_work_is_counted():
    reading, meter = PatchReading(NET, patcher()), Meter()
    reading.turn(TEXT, meter)
    patches = sum(patcher()(TEXT)) - 1
    assert tuple(meter)[:3] == (1, 1 + len(TEXT), 3*(1 + len(TEXT)) + 2*patches)
    reading.turn(TEXT, meter)
    assert meter.calls == 1   # all was known

@pytest.mark.parametrize("n", [10, 11, 12, 13])
def test_local_rows_read_the_patches_of_the_context(n):
    "Against one pass over the text whose rows read no later patch; the target's own rows stay as they were"
    target, text = ByteTarget(NET, patcher()), TEXT[:n+8]
    draft, tree = LocalDraft(target), tree_of(TEXT[:n], TEXT[n:n+8])
    draft(tree)[0]
    starts = torch.tensor([patcher()(text)])
    known = int(starts[0, :n+1].sum()) - 1   # patches complete in the context without its last byte
    with torch.inference_mode():
        h, o = NET.read(torch.tensor([(BOS, *text)]), starts)
        z = NET.decode(h, o, latest_patch(starts).clamp(max=known - 1))[0, n:]
    assert abs(np.array([*draft(tree)]) - z.softmax(-1).numpy()).max() < 1e-12
    assert abs(np.array([*target(tree)]) - whole(text)[n:].softmax(-1).numpy()).max() < 1e-12
    assert draft.meter.calls == 1 and draft.meter.tokens == 9

@faithful("BLT-DV", part="specref.bytes.patches.HiddenBlockDraft", plain={
    "the local decoder byte by byte": lambda target, block: LocalDraft(target)})
def test_hidden_blocks_are_those_of_the_training(subject):
    target = ByteTarget(NET, patcher())
    starts = patcher()(TEXT)
    for n in [n for n in range(8, 30) if not starts[n+1]][:4]:   # the patch read is the latest
        draft = subject(target, 4)
        rows = draft(tree_of(TEXT[:n], (1, 2, 3)))
        x, cut = torch.tensor([(BOS, *TEXT[:n+4])]), torch.tensor([[n]])
        with torch.inference_mode():
            hidden = torch.ones(1, 4, dtype=torch.bool)
            text, block = block_logits(NET, x, torch.tensor([patcher()(TEXT[:n+4])]), cut, hidden)
        wanted = torch.cat([text[0, n:n+1], block[0, 1:]]).softmax(-1).numpy()
        assert abs(np.array([*rows]) - wanted).max() < 1e-12
        assert draft.meter.calls == 1

def tree_of(ctx, tokens):
    tree = Tree(ctx)
    for i, x in enumerate(tokens): tree.add(i, x)
    return tree

@pytest.mark.parametrize("make", [lambda t: blt_s(t, 0), lambda t: blt_s(t, 6), lambda t: blt_dv(t, 4)],
                         ids=["plain", "BLT-S", "BLT-DV"])
def test_greedy_text_is_that_of_the_model(make):
    target = ByteTarget(NET, patcher(), temperature=0)
    text = generate(target, make(target).drafter, reject, TEXT[:12], 24, Seeded(0))
    alone = autoregressive(ByteTarget(NET, patcher(), temperature=0), TEXT[:12], 24, Seeded(0))
    assert text == alone

def test_passes_fall_with_drafts_past_the_patch():
    passes = []
    for beyond in (0, 8):
        target = ByteTarget(NET, patcher())
        text = generate(target, blt_s(target, beyond).drafter, reject, TEXT[:12], 60, Seeded(1))
        passes.append(len(text.ledger.rounds))
    assert passes[1] < .8*passes[0]

def test_branches_are_read_path_by_path():
    target, tree = ByteTarget(NET, patcher()), Tree(TEXT[:9])
    for u, x in ((0, 50), (0, 60), (1, 70), (2, 80), (2, 90)): tree.add(u, x)
    rows = target(tree)
    for i in range(len(tree)): assert abs(rows[i] - whole(tree.text(i))[-1].softmax(-1).numpy()).max() < 1e-12

def test_rows_have_the_temperature_and_weights_before_it():
    rows, z = ByteTarget(NET, patcher(), temperature=.5)(tree_of(TEXT[:9], TEXT[9:11])), whole(TEXT[:11])[9:]
    for i in range(3):
        assert abs(rows[i] - (2*z[i]).softmax(-1).numpy()).max() < 1e-12
        assert abs(rows.raw(i) - (z[i] - z[i].max()).exp().numpy()).max() < 1e-12

@pytest.mark.parametrize("draft", [LocalDraft, lambda target: HiddenBlockDraft(target, 4)],
                         ids=["BLT-S", "BLT-DV"])
def test_another_context_is_another_draft(draft):
    "Also one that begins alike, after the draft has read the first"
    both, alone = (draft(ByteTarget(NET, patcher())) for _ in range(2))
    both(tree_of(TEXT[:20], TEXT[20:22]))
    wanted = alone(tree_of(TEXT[:12], TEXT[12:14]))
    found = both(tree_of(TEXT[:12], TEXT[12:14]))
    assert all(abs(found[i] - wanted[i]).max() < 1e-12 for i in range(3))

# The rows of the table, on tables of fractions

@faithful("BLT-S", plain={"a constant length": having(schedule=lambda end: ConstantLength(4)),
                          "the patch alone": having(schedule=lambda end: replace(end, beyond=0))})
def test_a_draft_ends_two_tokens_past_its_patch(subject):
    "There a patch ends with token 0"
    lengths = set()
    for seed in range(12):
        tokens = subject(random_table(3, seed), gamma=8).drafter((1,), Seeded(seed)).token[1:]
        lengths.add(len(tokens))
        assert len(tokens) == min(8, [*tokens, *[0]*8].index(0) + 3)
    assert len(lengths) > 3

@faithful("BLT-DV", plain={"a token at a time": "speculative sampling"})
def test_hidden_tokens_are_read_in_one_call(subject):
    "The row of a place has read token 0 at the places before it, whatever is drawn there"
    for seed in range(4):
        draft = random_table(3, seed, zeros=False)
        tree = subject(draft, gamma=4).drafter((1,), Seeded(seed))
        assert draft.meter.calls == 1
        assert [*map(tuple, tree.law[1:])] == [tuple(draft.law((1,) + (0,)*d)) for d in range(4)]
