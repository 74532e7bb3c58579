"33c_specdec: slots in one pass, exact and lossy verification, glancing by hand, and the shipped models"
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np, pytest, torch
from torch.nn import functional as F

from helpers import cold, constant, examples, faithful, kinds, proves, refuses, seeds, related_pair
from published import drafted, verified
from specref import (autoregressive, Chain, exact, generate, iid, Jacobi, law_of, loop_law, random_table,
                     reject, rounds, Seeded, TableModel, target_law, top_beta, tv_outcomes)
from specref.core.tree import edge_laws, likeliest_points
from specref.models.embedded import stored
from specref.models.encoder_decoder import EncoderDecoderModel
from specref.train import specdec
from specref.train.specdec import (CHARACTERS, END_CHAR, GAP_CHAR, MASK_CHAR, PAD_CHAR, VOWELS, SlotModel,
                                   SpecDec, TranslationRecipe, char_ids, distilled_lines, drafter_loss,
                                   glanced, greedy_lines, hidden_vowels, ids_text, marian, masked_blocks,
                                   pad_rows, shipped_drafter, slot_loss, slot_matches, spec_drafter,
                                   task_lines, train_translation, translation_loss, translation_model,
                                   translation_target, whole_lines)
from specref.verify.lossy import GreedyModel

LINES = ("open the file and read a line", "a list of all the names here", "returns an integer or raises")

# Slots and their verification, on tables

@dataclass(frozen=True)
class TableSlots:
    "Slot j has the row of `table` after the context and j more tokens, all equal to j"
    table: TableModel
    depth: int
    @property
    def V(self): return self.table.V
    def __call__(self, ctx): return [self.table.law((*ctx, *[j % self.V] * j)) for j in range(self.depth)]

class Blind(SpecDec):
    "Wrong: the edges state the likeliest token's row where the token was drawn as a point"
    def __call__(self, ctx, rng):
        tree = super().__call__(ctx, rng)
        tree.law[1:] = self.slots(ctx)[:len(tree) - 1]
        return tree

@proves("thm-slots")
@pytest.mark.parametrize("draw", [likeliest_points, iid])
@examples(12, kinds, seeds)
def test_blocks_are_exact(draw, kind, seed):
    "Equal fractions for three tokens with an end token, whatever the slots; all edges are true"
    target, table = related_pair(kind, 3, seed)
    drafter = SpecDec(TableSlots(table, 2), draw, end=(2,))
    assert loop_law(target, drafter, reject, (0,), 3, stop=(2,)) == target_law(target, (0,), 3, stop=(2,))
    trees = law_of(lambda rng: drafter((0,), rng))
    assert all(stated == true for _, stated, true in edge_laws(trees))

def test_no_slot_is_drafted_behind_an_end_token():
    slots = TableSlots(constant(1, 3, 1), 3)
    assert SpecDec(slots, end=(1,))((0,), Seeded(0)).token == [None, 1]
    assert SpecDec(slots, end=(2,))((0,), Seeded(0)).token == [None, 1, 1, 1]

def test_soft_rows_for_likeliest_tokens_are_detected():
    target, table = random_table(3, 1, zeros=False), random_table(3, 5, zeros=False)
    assert loop_law(target, Blind(TableSlots(table, 2)), reject, (0,), 2) != target_law(target, (0,), 2)

@proves("thm-slots")
@examples(10, seeds)
def test_likeliest_tokens_are_accepted_by_the_targets_probability_of_the_block(seed):
    "At least i with probability p(y1 ... yi); at temperature 0 up to the first that is not greedy"
    target, drafter = random_table(3, seed), SpecDec(TableSlots(random_table(3, seed + 1), 3))
    block = drafter((0,), Seeded(0)).token[1:]
    found = law_of(lambda rng: next(rounds(target, drafter, reject, (0,), One(rng))).verdict.node)
    p = target_law(target, (0,), 3)
    for i in range(4):
        begins = sum(w for text, w in p.items() if text[:i] == tuple(block[:i]))
        assert sum(w for node, w in found.items() if node >= i) == begins
    text = autoregressive(cold(target), (0,), 3, Seeded(0))
    same = [a == b for a, b in zip(block, text)] + [False]
    assert next(rounds(cold(target), drafter, reject, (0,), Seeded(0))).verdict.node == same.index(False)

@dataclass
class One:
    "An enumerating rng as the rng of a single round"
    rng: object
    def at(self, i): return self.rng.at(i)

def test_the_gate_of_the_example():
    table = {(): (3, 2, 1), (0,): (1, 3, 0), (1,): (1, 1, 0)}
    target = TableModel(3, lambda text: exact(*table.get(text[1:], (1, 1, 1))))
    @dataclass(frozen=True)
    class Rows:
        V = 3
        depth = 2
        def __call__(self, ctx): return exact(2, 1, 0), exact(1, 2, 0)
    gate = top_beta(2, .5)
    law = loop_law(GreedyModel(target), SpecDec(Rows(), iid), gate, (0,), 1)
    assert law == {(0,): Fraction(2, 3), (1,): Fraction(1, 3)}

def by_own_rows(system):
    "Wrong: the block is verified against the rows that it was drafted from"
    def verify(p, tree, rng):
        own = [*(np.asarray(q) for q in tree.law[1:]), p[len(tree) - 1]]
        return system.verify(own, tree, rng)
    return verified(verify)(system)

@faithful("SpecDec", plain={
    "the drafter's own rows": by_own_rows, "no tolerance": verified(top_beta(3, 100.)),
    "no rank": verified(top_beta(99, 1.)), "the likeliest token alone": verified(top_beta(1, 1.))})
@proves("prop-spec-verification")
def test_every_token_passes_both_conditions(subject):
    "By the target's row after the tokens before it: one of the three likeliest, at most a nat below the best"
    ranks, verify = set(), subject(random_table(4, 0)).verify
    for seed in range(6):
        target = GreedyModel(random_table(4, seed, zeros=False))
        drafter = SpecDec(TableSlots(random_table(4, seed + 50, zeros=False), 3), iid)
        for text in loop_law(target, drafter, verify, (0,), 3):
            for i, x in enumerate(text):
                p = target.model.law((0, *text[:i])).astype(float)
                ranks.add(better := sum(p > p[x]) + sum(p[:x] == p[x]))
                assert better < 3 and np.log(p.max() / p[x]) <= 1 + 1e-12
    assert ranks == {0, 1, 2}

@proves("prop-spec-verification")
def test_the_lossy_rule_accepts_no_less_and_has_a_distance():
    "Round by round at least as far as the exact rule at temperature 0; the distance grows with beta"
    farther, distances = 0, []
    for seed in range(6):
        target = GreedyModel(random_table(4, seed, zeros=False))
        drafter = SpecDec(TableSlots(random_table(4, seed + 50, zeros=False), 3))
        nodes = [next(rounds(target, drafter, rule, (0,), Seeded(0))).verdict.node
                 for rule in (reject, top_beta(1, 1.), top_beta(3, 1.))]
        assert nodes[0] == nodes[1] <= nodes[2]
        farther += nodes[2] > nodes[1]
        drawn, want = replace(drafter, draw=iid), target_law(target, (0,), 2)
        laws = (loop_law(target, drawn, top_beta(b, 1.), (0,), 2) for b in (1, 2, 3))
        distances.append([tv_outcomes(law, want) for law in laws])
    means = np.mean(np.array(distances, float), 0)
    assert farther > 1 and means[0] == 0 < means[1] < means[2]

# The network

def small(layers=1, seed=0):
    "A tiny target and its drafter, in double precision, weights so large that rows differ"
    torch.manual_seed(seed)
    model = marian(2, 2, 32, 48).double().eval()
    net = spec_drafter(model, layers).double().eval()
    with torch.no_grad():
        for w in (*model.parameters(), *net.parameters()):
            if w.requires_grad: w.add_(.2 * torch.randn_like(w))
    return model, net

def test_the_drafter_begins_as_parts_of_the_target():
    "Embedding, encoder and the first decoder layers; none of the weights is shared"
    model = marian(2, 3, 32, 48)
    net = spec_drafter(model, 2)
    mine, old = dict(net.body.model.named_parameters()), dict(model.model.named_parameters())
    assert all(torch.equal(w, old[name]) for name, w in mine.items())
    assert {n.split(".")[2] for n in mine if n.startswith("decoder.layers")} == {"0", "1"}
    assert not {w.data_ptr() for w in mine.values()} & {w.data_ptr() for w in old.values()}

class Autoregressive(SpecDec):
    "The toy: a small draft model under the name of SpecDec"
    def __call__(self, ctx, rng):
        model = EncoderDecoderModel(self.slots.net.body, self.slots.x[0].tolist(), check=False)
        model.meter = self.slots.meter
        return Chain(model, self.depth)(ctx, rng)

class SlotBySlot(SpecDec):
    "Wrong: each slot is filled before the next is computed"
    def __call__(self, ctx, rng):
        tree = specdec.Tree(ctx)
        for i in range(self.depth): tree.grow(i, self.draw(self.slots(tree.text(i))[0]), rng)
        return tree

@faithful("SpecDec, exact", plain={
    "an autoregressive small draft": drafted(Autoregressive), "slot by slot": drafted(SlotBySlot)})
@pytest.mark.parametrize("k", [3, 8])
def test_one_pass_a_round(subject, k):
    "For any k; the encoder runs once; the row of a slot does not depend on what is drawn in another"
    model, net = small()
    target = EncoderDecoderModel(model, char_ids(LINES[0], VOWELS), check=False)
    system = subject(random_table(3, 0), dict(slots=SlotModel(net, target.source, k), draw=iid))
    run, drafter = system(target, target.start, 6, Seeded(0)), system.drafter
    m, n = run.ledger.models["draft"], len(run.ledger.rounds)
    assert m.calls == n
    assert m.layer_tokens == m.tokens + 2 * len(target.source)
    trees = [drafter((0, 70, 74), Seeded(seed)) for seed in range(4)]
    assert len({tuple(tree.token) for tree in trees}) == 4
    for tree in trees: assert np.allclose(tree.law[1:], trees[0].law[1:], atol=0)

class Causal(specdec.SpecDrafter):
    "Wrong: a place attends to earlier places alone"
    def forward(self, states, x, y):
        h = self.body.get_decoder()(input_ids=y, encoder_hidden_states=states, use_cache=False)[0]
        return self.body.lm_head(h)
class OnePlace(specdec.SpecDrafter):
    "Wrong: all masks stand at the same position"
    def forward(self, states, x, y):
        first = int((y[0] != MASK_CHAR).sum())
        z = super().forward(states, x, y[:, :first + 1])
        return torch.cat([z, z[:, -1:].expand(-1, y.shape[1] - first - 1, -1)], 1)
class Unconditional(specdec.SpecDrafter):
    "Wrong: without the source"
    def forward(self, states, x, y): return super().forward(0 * states, x, y)

@faithful("SpecDec, exact", part="SpecDrafter", plain={
    "causal masks": Causal, "one query for all places": OnePlace, "no source": Unconditional})
def test_what_a_mask_attends_to(subject):
    "Its own position, all of the text, the masks behind it and the source; not to padding"
    _, net = small()
    net, x = subject(net.body), hidden_vowels(LINES[:1])
    states, text = net.encode(x), [70, 74, 82]
    def slots(text, masks, pads=0, source=states):
        y = torch.tensor([[*text, *[MASK_CHAR]*masks, *[PAD_CHAR]*pads]])
        with torch.no_grad(): z = net(source, x, y)
        return z[0, len(text):len(text) + masks]
    base = slots(text, 4)
    assert not torch.allclose(base[0], base[1], atol=1e-3)   # distinct queries
    assert not torch.allclose(base[:3], slots(text, 3), atol=1e-6)   # the masks behind count
    assert torch.allclose(base, slots(text, 4, pads=3), atol=1e-12)
    for i in range(3):
        other = [*text[:i], 90, *text[i+1:]]
        assert all((slots(other, 4) - base).abs().amax(-1) > 1e-6)
    assert not torch.allclose(base, slots(text, 4, source=-states), atol=1e-3)

# Glancing

def hand_glancing(net, lines, k, share, seed):
    "The loss slot by slot: cut, guess, show, and the cross-entropy of what is still masked; the shown slots"
    y, gen = whole_lines(lines), torch.Generator().manual_seed(seed)
    first = (torch.rand(len(y), generator=gen) * (y != PAD_CHAR).sum(-1)).long().tolist()
    order, terms, shown = torch.rand(len(y), k, generator=gen), [], []
    for n, line in enumerate(lines):
        text = [*char_ids(line), END_CHAR]
        want, source = text[first[n]:first[n] + k], torch.tensor([char_ids(line, VOWELS)])
        def rows(tokens):
            tokens = torch.tensor([[*text[:first[n]], *tokens, *[MASK_CHAR]*(k - len(tokens))]])
            return net(net.encode(source), source, tokens)[0, first[n]:first[n] + len(want)]
        guess = rows([MASK_CHAR]*len(want)).argmax(-1).tolist()
        wrong = sum(a != b for a, b in zip(guess, want))
        best = sorted(range(len(want)), key=lambda j: order[n, j].item())[:int(share * wrong)]
        z = rows([x if j in best else MASK_CHAR for j, x in enumerate(want)]).log_softmax(-1)
        terms += [-z[j, x] for j, x in enumerate(want) if j not in best]
        shown.append(len(best))
    return torch.stack(terms).mean(), shown

def counted(net, x, y, k, share, gen=None):
    "Wrong: the loss is taken at the shown slots, too"
    masked, places = masked_blocks(y, k, gen)
    want = F.pad(y, (0, k), value=PAD_CHAR).gather(1, places)
    def slots(t): return net(net.encode(x), x, t).gather(1, places[..., None].expand(-1, -1, CHARACTERS))
    filled = glanced(slots(masked).argmax(-1), want, want != PAD_CHAR, share, gen)
    z = slots(masked.scatter(1, places, torch.where(filled, want, MASK_CHAR)))
    return F.cross_entropy(z[want != PAD_CHAR], want[want != PAD_CHAR])

def shown_behind(net, x, y, k, share, gen=None):
    "Wrong: the text behind the block stays visible"
    hidden = masked_blocks
    def blocks(y, k, gen):
        masked, places = hidden(y, k, gen)
        behind = torch.arange(masked.shape[1]) > places[:, -1:]
        return torch.where(behind, F.pad(y, (0, k)), masked), places
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specdec, "masked_blocks", blocks)
        return slot_loss(net, x, y, k, share, gen)

def without_glances(net, x, y, k, share, gen=None): return slot_loss(net, x, y, k, 0., gen)
def wrong_ones(net, x, y, k, share, gen=None):
    "Wrong: the slots that were guessed wrong are shown, not random ones"
    def chosen(guess, y, on, share, gen):
        n = ((guess != y) & on).sum(-1)
        rank = (~((guess != y) & on)).int().argsort(dim=-1, stable=True).argsort(-1)
        return on & (rank < (share * n)[:, None].floor())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specdec, "glanced", chosen)
        return slot_loss(net, x, y, k, share, gen)

@faithful("SpecDec, exact", part="slot_loss", plain={
    "shown slots in the loss": counted, "the text behind the block": shown_behind,
    "no glancing": without_glances, "the wrong slots": wrong_ones})
def test_the_loss_by_hand(subject):
    "For several cuts and shares, some of them near the end of a line"
    _, net = small()
    for seed, share in ((0, .5), (1, .3), (3, .9)):
        x, y, gen = hidden_vowels(LINES), whole_lines(LINES), torch.Generator().manual_seed(seed)
        want, shown = hand_glancing(net, LINES, 6, share, seed)
        assert torch.allclose(subject(net, x, y, 6, share, gen), want, atol=1e-9) and sum(shown)

def test_how_many_slots_are_shown():
    "floor(share x wrong) of the slots that are in the text, also right ones; none when all are right"
    y = torch.tensor([[5, 6, 7, 8, 0, 0]] * 200)
    guess, gen = torch.tensor([[5, 9, 9, 9, 9, 9]] * 200), torch.Generator().manual_seed(0)
    filled = glanced(guess, y, y != 0, .7, gen)
    assert {*filled.sum(-1).tolist()} == {2} and not filled[:, 4:].any()
    assert filled[:, :4].sum(0).min() > 60   # each about 100 times; below 60 with a probability under 1e-7
    assert not glanced(y, y, y != 0, .7, gen).any()

@proves("prop-slot-rows")
def test_rows_of_training_are_those_of_drafting():
    "Without glances, in a batch with padding and behind any cut; the text behind the cut does not count"
    _, net = small()
    x, y, gen = hidden_vowels(LINES), whole_lines(LINES), torch.Generator().manual_seed(4)
    masked, places = masked_blocks(y, 5, gen)
    with torch.no_grad(): z = net(net.encode(x), x, masked)
    for n, line in enumerate(LINES):
        first = int(places[n, 0])
        drafted = SlotModel(net, char_ids(line, VOWELS), 5)((PAD_CHAR, *char_ids(line)[:first]))
        assert np.allclose(z[n, first:first + 5].softmax(-1).numpy(), drafted, atol=1e-10)

def test_slots_at_a_temperature():
    _, net = small()
    def rows(t): return np.array(SlotModel(net, char_ids(LINES[0], VOWELS), 3, t)((PAD_CHAR, 70)))
    warm, zero = rows(1.), rows(0)
    assert np.allclose(rows(.5), warm**2 / (warm**2).sum(-1, keepdims=True), atol=1e-12)
    assert (zero.argmax(-1) == warm.argmax(-1)).all() and {*zero.flat} == {0, 1}

def test_slot_matches_counts_accepted_tokens():
    "The mean over cuts is that of rounds at temperature 0 on the target's own texts"
    model, net = small()
    with torch.no_grad(): net.body.load_state_dict(model.state_dict(), strict=False)
    pairs = [(line, row) for line, row in zip(LINES, greedy_lines(model, LINES, 20))]
    accepted, rates = slot_matches(net, pairs, 4, seed=1)
    first = masked_blocks(pad_rows([row for _, row in pairs]), 4, torch.Generator().manual_seed(1))[1][:, 0]
    nodes = []
    for (line, row), t in zip(pairs, first.tolist()):
        target = EncoderDecoderModel(model, char_ids(line, VOWELS), temperature=0, check=False)
        drafter = SpecDec(SlotModel(net, target.source, 4, 0))
        nodes.append(min(next(rounds(target, drafter, reject, (0, *row[:t]), Seeded(0))).verdict.node,
                         len(row) - t))
    assert abs(accepted - np.mean(nodes)) < 1e-6 and len(rates) == 4

# Training, and what is shipped

def test_the_task():
    assert ids_text(char_ids("Bad idea", VOWELS)) == "B·d ·d··" and ids_text(char_ids("Bad")) == "Bad"
    assert ids_text(char_ids("A text, EITHER", VOWELS)) == "· t·xt, ··TH·R"
    assert GAP_CHAR not in char_ids("any text?") and max(char_ids("~ ")) == CHARACTERS - 1
    train, held = task_lines(), task_lines(held_out=True)
    assert len(train) > 20_000 and len(held) > 1000 and all(24 <= len(line) <= 64 for line in held)
    assert len({*train}) == len(train)

def test_the_loss_of_translation_by_hand():
    "The characters of a line and its end, each after the start token and those before"
    (model, _), terms = small(), []
    for line in LINES:
        text = [*char_ids(line), END_CHAR]
        rows = model(input_ids=torch.tensor([char_ids(line, VOWELS)]),
                     decoder_input_ids=torch.tensor([[PAD_CHAR, *text[:-1]]])).logits[0].log_softmax(-1)
        terms += [-rows[i, x] for i, x in enumerate(text)]
    assert abs(translation_loss([*LINES], 3)(model, 0) - torch.stack(terms).mean()) < 1e-5

def test_the_share_of_glancing_goes_down(monkeypatch):
    shares = []
    monkeypatch.setattr(specdec, "slot_loss", lambda net, x, y, k, share, gen: shares.append(share))
    loss = drafter_loss([(LINES[0], [5, END_CHAR])], TranslationRecipe())
    for step in (0, 300, 600): loss(None, step)
    assert np.allclose(shares, (.5, .4, .3))

@pytest.fixture
def trained(tmp_path, monkeypatch):
    "The whole recipe in small"
    monkeypatch.setattr(specdec, "task_lines", lambda: [*LINES] * 2)
    recipe = TranslationRecipe((1, 1), 1, 32, 32, 30, 3e-3, rows=3, distilled=3, drafter_steps=30, k=6)
    train_translation(tmp_path, recipe)
    return recipe, tmp_path

def test_training_lowers_both_losses(trained):
    recipe, folder = trained
    torch.manual_seed(0)
    begin = marian(1, 1, 32, 32)
    model = specdec.MarianMTModel.from_pretrained(folder/"data"/"translation"/"target").float()
    loss = translation_loss([*LINES], 3)
    assert loss(model, 0) < loss(begin, 0) - .3
    pairs, net = distilled_lines(model, LINES, folder/"distilled"), spec_drafter(model)
    assert [tuple(row) for _, row in pairs] == [tuple(row) for row in greedy_lines(model, LINES)]
    drafted, before = drafter_loss(pairs, recipe), drafter_loss(pairs, recipe)(net, 0)
    net.load_state_dict(torch.load(folder/"specdec.pt", weights_only=True)["model"])
    assert drafted(net, 0) < before - .3

def test_a_finished_training_writes_the_same_weights(trained):
    recipe, folder = trained
    files = folder/"specdec.pt", *(folder/"data"/"translation").glob("*/model.safetensors")
    before = [file.read_bytes() for file in files]
    train_translation(folder, recipe)
    assert before == [file.read_bytes() for file in files] and len(before) == 3

def untrained(target, k): return SpecDec(SlotModel(spec_drafter(translation_model()), target.source, k, 0))

@faithful("SpecDec, exact", part="specref.train.specdec.spec_decoder", plain={
    "untrained": untrained,
    "Jacobi": lambda target, k: Jacobi(target.V, k, end=target.end)})
def test_the_shipped_drafter(subject):
    "Greedy texts of held-out lines in double precision; blocks of 8, more than 3.5 tokens a round"
    emitted = passes = 0
    for line in task_lines(held_out=True)[7:700:230]:
        target = translation_target(line, torch.float64, temperature=0)
        drafter = subject(target, 8)
        run = generate(target, drafter, reject, target.start, 70, Seeded(0), stop=target.end)
        assert run == autoregressive(target, target.start, 70, Seeded(0), stop=target.end)
        emitted, passes = emitted + len(run), passes + len(run.ledger.rounds)
    assert emitted > 3.5 * passes

def test_the_shipped_models_are_small():
    assert sum(w.numel() for w in shipped_drafter().parameters()) < sum(
        w.numel() for w in translation_model().parameters()) < 1.3e6
    assert sum(file.stat().st_size for file in stored("translation").rglob("*")) < 4e6

def test_bad_input_is_refused():
    _, net = small()
    refuses("k", SlotModel, net, (5, 6), 0)
    refuses("temperature", SlotModel, net, (5, 6), 3, -1.)
    for source in ((), (5,) * 129, (5, CHARACTERS)): refuses("source", SlotModel, net, source)
    assert len(SlotModel(net, (5,) * 128, 3)((PAD_CHAR, *[70] * 125))) == 3   # the last positions
    for ctx in ((), (PAD_CHAR, *[70] * 126)): refuses("ctx", SlotModel(net, (5, 6), 3), ctx)
