"30e_online: exact while it learns, what the buffer holds, updates, boosted training sets, merged trees"
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction as Fr
from math import prod
from types import SimpleNamespace

import numpy as np, pytest, torch

from helpers import (examples, faithful, models, proves, random_table, refuses, round_tokens, seeds, tiny,
                     related_pair)
from published import drafted, having
from specref import (autoregressive, Branching, Chain, embedded, exact, generate, HFModel, iid, law_of,
                     loop_law, overlap, prompts, reject, rounds, Seeded, TableModel, target_law, Tree, tv,
                     without_replacement)
from specref.models.embedded import DOMAINS, windows
from specref.train.boosted import (SERIES, MergedDrafts, agrees, boost_record, coverage, draft_series,
                                   first_to_last, kept_loss, merged_tree, no_drop, sampled_domains,
                                   sibling_acceptance, uniform_order)
from specref.train.harness import StateDataset, TargetModel
from specref.train.online import (REPLAYS, CountedDraft, NetworkVersion, OnlineDrafter, ReplayItem,
                                  accepted_nodes, decode_and_learn, no_nodes, one_domain_draft,
                                  rejected_nodes, replay_batch, retrace, serve, shift_record,
                                  shifting_order, soft_kl, stream_record)
from specref.verify.siblings import acceptance_prob_iid

V = 5

# A draft that learns while it decodes

def learning(q, most=1, **kw): return OnlineDrafter(CountedDraft(q), 2, most=most, **kw)

class Restated(OnlineDrafter):
    "Wrong: the draft is updated between drafting and verification, and its rows are computed again"
    def __call__(self, ctx, rng):
        drawn, tree = super().__call__(ctx, rng), Tree(ctx)
        rows = self.draft.update([ReplayItem(ctx, tuple(exact(5, 2, 1)))]).model(drawn)
        for u, x in zip(drawn.parent[1:], drawn.token[1:]): tree.add(u, x, rows[u])
        return tree

@faithful("online speculative decoding", plain={"rows of a version that did not draft": drafted(Restated)})
@proves("thm-online-exact")
def test_texts_are_exact_while_the_draft_learns(subject):
    "Whole loops; an update after every stored position, whichever positions are stored"
    for seed in range(3):
        p, q = random_table(3, seed, zeros=False), random_table(3, seed + 10, zeros=False)
        for nodes in (rejected_nodes, accepted_nodes):
            system = subject(q, dict(most=1, nodes=nodes), gamma=2)
            found = loop_law(p, system.drafter, system.verify, (0,), 3, careful=True)
            assert found == target_law(p, (0,), 3)

@examples(10, models(3), seeds)
@proves("thm-online-exact")
def test_two_requests_are_independent(pair, seed):
    "The joint distribution of two requests, an update between them, is the product of the target's"
    p, q = pair
    def both(rng):
        drafter, texts = OnlineDrafter(CountedDraft(q), 1, every=1), ()
        for ctx in ((0,), (1,)):
            done, drafter = decode_and_learn(p, drafter, reject, ctx, 1, rng)
            texts += (done[0].tokens[:1],)
        assert drafter.version == 2
        return texts
    first, second = (target_law(p, ctx, 1) for ctx in ((0,), (1,)))
    assert law_of(both) == {(a, b): v * w for a, v in first.items() for b, w in second.items()}

@proves("prop-one-version")
def test_one_version_verifies():
    "Rows of the drawing versions are exact, also two in a draft; rows of a later one are off by a third"
    a, b = random_table(3, 1), random_table(3, 2)
    def draft(ctx, rng):
        tree = Tree(ctx)
        for u, version in enumerate((a, b)): tree.grow(u, iid(version.law(tree.text(u))), rng)
        return tree
    p = random_table(3, 3)
    assert loop_law(p, draft, reject, (0,), 3) == target_law(p, (0,), 3)
    def restated(ctx, rng):
        tree = Tree(ctx)
        tree.add(0, rng.pick(exact(3, 1)), exact(1, 3))
        return tree
    half = TableModel(2, lambda text: exact(1, 1))
    assert loop_law(half, restated, reject, (0,), 1) == {(0,): Fr(5, 6), (1,): Fr(1, 6)}

def storing(nodes): return having(nodes=lambda rejected: nodes)
OFFLINE = {"replay of accepted positions": storing(accepted_nodes),
           "offline training, no update": storing(no_nodes)}

@faithful("online speculative decoding", plain=OFFLINE)
@proves("thm-rejected-weight")
def test_a_position_is_stored_by_the_total_variation(subject):
    "P(stored) = P(reached) · TV(p, q) for every context of the draft, with the target's row"
    for kind in ("independent", "superset", "equal"):
        p, q = related_pair(kind, 3, 1)
        def run(rng):
            one = next(rounds(p, Chain(q, 2), reject, (0,), rng))
            items = subject.drafter(q, dict(most=32), gamma=2).learn(one).buffer
            assert all(row == tuple(p.law(text)) for text, row in items)
            return tuple(text for text, _ in items)
        stored = Counter()
        for texts, w in law_of(run).items(): stored.update({text: w for text in texts})
        for text in ((0,), (0, 0), (0, 1), (0, 2)):
            rows = [(p.law(text[:k]), q.law(text[:k])) for k in range(1, len(text) + 1)]
            reached = prod(min(a[x], b[x]) for (a, b), x in zip(rows, text[1:]))
            assert stored[text] == reached * tv(*rows[-1])

def served_table(subject):
    "Requests to a table whose draft is right after token 0 and wrong after token 1"
    p = TableModel(2, lambda text: exact(1, 1) if text[-1] == 0 else exact(3, 1))
    q = TableModel(2, lambda text: exact(1, 1) if text[-1] == 0 else exact(1, 3))
    drafter = subject.drafter(q, dict(every=2, most=32), gamma=3)
    *_, (_, after) = serve(p, drafter, reject, [(0,)]*8, 12, Seeded(0))
    return overlap(exact(3, 1), after.draft.model(Tree((1,)))[0]), dict(after.draft.stored)

@faithful("online speculative decoding", plain=OFFLINE)
def test_only_errors_are_learnt(subject):
    "A context where the draft is right is never stored; the overlap where it is wrong rises"
    after, stored = served_table(subject)
    assert after > Fr(9, 10) > overlap(exact(3, 1), exact(1, 3)) and stored.keys() == {(1,)}

def test_errors_by_hand():
    "After m errors the rejection probability is 1/(3(1 + m))"
    p, draft = exact(3, 2, 1), CountedDraft(TableModel(3, lambda text: exact(1, 2, 3)))
    for m in range(4):
        assert 1 - overlap(p, draft.model(Tree((0,)))[0]) == Fr(1, 3*(1 + m))
        assert draft.model(Tree((1,)))[0].tolist() == [Fr(1, 6), Fr(1, 3), Fr(1, 2)]
        draft = draft.update([ReplayItem((0,), tuple(p))])
    once = CountedDraft(TableModel(3, lambda text: exact(1, 2, 3)), weight=2).update(
        [ReplayItem((0,), tuple(p))]*2)
    assert once.model(Tree((0,)))[0].tolist() == [Fr(1, 3)]*3

@pytest.mark.parametrize("every", [1, 3, 8])
def test_the_number_of_updates(every):
    "One for each `every` requests, rounded down; a full buffer is one more; the buffer is empty after it"
    p, q = related_pair("independent", 3, 1, zeros=False)
    start = OnlineDrafter(CountedDraft(q), 2, every=every)
    versions = [after.version for _, after in serve(p, start, reject, [(0,)]*10, 6, Seeded(0))]
    assert versions == [(i + 1) // every for i in range(10)]
    full = replace(start, most=2, every=100)
    for done, after in serve(p, full, reject, [(0,)]*3, 20, Seeded(0)): assert len(after.buffer) < 2
    assert after.version >= 3 and start.version == 0 and not start.draft.stored

# A network as the draft

def net_of(V=V, seed=3, dtype=torch.float64): return tiny(V, layers=1, seed=seed).to(dtype)

def items_of(target, n=6, T=9):
    texts = torch.randint(V, (n, T), generator=torch.Generator().manual_seed(0)).tolist()
    cuts = [tuple(text[:k]) for text in texts for k in (3, 5, 9)]
    return [ReplayItem(text, tuple(target.law(text).tolist())) for text in cuts]

def test_a_batch_has_each_request_once():
    "Items of one request share a row; their labels are at their own positions"
    items = [ReplayItem((1, 2), (.5, .5)), ReplayItem((1, 2, 3), (1., 0.)), ReplayItem((4,), (0., 1.)),
             ReplayItem((1, 2), (.5, .5))]
    x, at, places, p = replay_batch(items)
    assert x.tolist() == [[1, 2, 3], [4, 0, 0]] and at.tolist() == [0, 0, 1, 0]
    assert places.tolist() == [1, 2, 0, 1] and p.tolist() == [list(row) for _, row in items]

def reverse_mix(p, logq):
    "A generalised divergence: nine parts KL(p, q), one part KL(q, p)"
    q = logq.exp()
    return .9*soft_kl(p, logq) + .1*(q * (logq - p.log())).sum(-1)

@pytest.mark.parametrize("loss", [soft_kl, reverse_mix])
def test_an_update_is_one_step_on_the_stored_positions(loss):
    "The gradient is that of the mean over the items, each read alone; the old version does not change"
    net, items = net_of(), items_of(HFModel(tiny(V), check=False))
    before, hand = deepcopy(net.state_dict()), deepcopy(net).requires_grad_()
    def mean(net):
        terms = [loss(torch.tensor([row]), net(input_ids=torch.tensor([text])).logits[:, -1].log_softmax(-1))
                 for text, row in items]
        return torch.cat(terms).mean()
    mean(hand).backward()
    new = NetworkVersion(net, lr=1e-3, loss=loss).update(items)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values()))
    for w, old, now in zip(hand.parameters(), net.parameters(), new.net.parameters()):
        sure = w.grad.abs() > 1e-5   # Adam's first step has the sign of the gradient
        assert torch.equal((now - old)[sure].sign(), -w.grad[sure].sign())
    for _ in range(20): new = new.update(items)
    with torch.no_grad(): assert mean(new.net) < mean(net) - .1

def test_the_optimiser_is_part_of_a_version():
    "Two updates of one step are one of two steps: the averages of Adam go on"
    items, start = items_of(HFModel(tiny(V), check=False)), net_of()
    parts = NetworkVersion(start).update(items).update(items)
    whole = NetworkVersion(start, steps=2).update(items)
    assert all(map(torch.equal, parts.net.parameters(), whole.net.parameters()))

def test_versions_are_values():
    "An old drafter drafts with the old weights after an update, and updates from a version are the same"
    target, start = HFModel(tiny(V), check=False), NetworkVersion(net_of(), lr=1e-2, steps=2)
    old = OnlineDrafter(start, 3, most=4)
    first = old((1, 2, 3), Seeded(0))
    done, new = decode_and_learn(target, old, reject, (1, 2, 3), 40, Seeded(1))
    assert new.version > 0 and old((1, 2, 3), Seeded(0)) == first != new((1, 2, 3), Seeded(0))
    items = items_of(target)
    once, again = (new.draft.update(items).net for _ in range(2))
    assert all(map(torch.equal, once.parameters(), again.parameters()))
    before = old.models[0].meter.calls
    new((1, 2, 3), Seeded(0))
    assert old.models[0].meter.calls > before   # the meter counts all versions

@faithful("online speculative decoding", plain={"no update": storing(no_nodes)})
def test_greedy_text_is_plain_text(subject):
    "On the embedded target in double precision, with updates inside the text"
    start = NetworkVersion(deepcopy(embedded("small", torch.float64).model), lr=1e-3, temperature=0)
    for domain in DOMAINS:
        target, ctx = embedded("target", torch.float64, temperature=0), prompts(domain, 1)[0]
        drafter = subject.drafter(embedded("small", torch.float64), dict(draft=start), gamma=3)
        done, after = decode_and_learn(target, drafter, reject, ctx, 16, Seeded(0))
        text = tuple(x for round in done for x in round.tokens)[:16]
        assert text == autoregressive(embedded("target", torch.float64, temperature=0), ctx, 16, Seeded(0))
        assert after.version > 0
        assert all(isinstance(row, tuple) and len({*row}) > 2 for _, row in after.buffer)   # unwarped rows

# A stream from its texts

@examples(4, models(3))
@proves("thm-given-text")
def test_rounds_given_the_text(pair):
    "The joint distribution of text and statuses is that of the loop, for chains of 1 and 2"
    p, q = pair
    for gamma in (1, 2):
        def loop(rng):
            text = generate(p, Chain(q, gamma), reject, (0,), 3, rng)
            return text.tokens, "".join(step.status for step in text.steps)
        def given_text(rng):
            text = autoregressive(p, (0,), 3, rng).tokens
            rows = [[model.law((0, *text[:k])) for k in range(3)] for model in pair]
            return text, retrace(text, *rows, gamma, rng)
        assert law_of(loop) == law_of(given_text)

def test_a_stream_is_served_in_order(boost_data):
    "Counts add up to the tokens, every eighth text ends a version; the stored positions matter"
    base, data = boost_data
    start = small_llama()
    found = shift_record(data, range(16), base, start, seed=0, gamma=2, lr=1e-2)
    for name, rows in found.items():
        assert [version for *_, version in rows] == [(i + 1) // 8 for i in range(16)]
        for a, tested, ends, _ in rows: assert 0 <= a <= tested <= 16 and a + ends == 16
    first, last = ({name: rows[part] for name, rows in found.items()} for part in (slice(8), slice(8, 16)))
    assert len({str(rows) for rows in first.values()}) == 1 and len({str(rows) for rows in last.values()}) > 1

class Noted:
    "A draft with the rows `q` that notes what it is updated on"
    model = None
    def __init__(self, q): self.q, self.items = q, ()
    def rows(self, x): return self.q
    def update(self, items):
        self.items += items
        return self

@pytest.mark.parametrize("name, letters", dict(rejected="Y", accepted="A", both="AY", none="").items())
def test_what_a_stream_stores(boost_data, name, letters):
    "The contexts whose token has this status, each with the target's row after it; the counts of a request"
    base, data = boost_data
    gen = torch.Generator().manual_seed(0)
    x, draft = torch.from_numpy(data.x[5:6]), Noted(torch.randn(1, 48, V, generator=gen).softmax(-1))
    with torch.no_grad(): p = base.model(input_ids=x).logits[0].softmax(-1)
    ids, rng = tuple(x[0].tolist()), Seeded(0)
    status = retrace(ids[32:], p[31:-1].numpy(), draft.q[0, 31:-1].numpy(), 2, rng.at(5).verify)
    drafter = OnlineDrafter(draft, 2, every=2)
    counts = stream_record(data, np.array([5, 5]), base, drafter, REPLAYS[name], rng)
    a, y, b = map(status.count, "AYB")
    assert counts == [[a, a + y, y + b, version] for version in (0, 1)] and a and y and b
    assert [text for text, _ in draft.items] == 2*[ids[:32+k] for k in range(16) if status[k] in letters]
    assert all(np.allclose(row, p[len(text) - 1], atol=1e-5) for text, row in draft.items)

def test_the_order_of_a_shifting_stream():
    "English first, as many as asked for, then all code; the seed gives another order"
    names = np.array(["code", "english", "english", "code", "english", "code"])
    order = shifting_order(names, 2, seed=0)
    assert [names[i] for i in order] == ["english"]*2 + ["code"]*3 and len({*order}) == 5
    assert len({tuple(shifting_order(names, 3, seed)) for seed in range(5)}) > 1

def test_domains_of_sampled_texts():
    "The same choice of domains as in the texts whose windows `write_samples` continues"
    ids = dict(zip(DOMAINS, (np.arange(500), np.arange(1000, 1900))))
    names = sampled_domains(ids, 100)
    parts = [windows(ids, i, 64, 32, seed=1)[:, 0].numpy() for i in range(2)]
    assert (names == np.where(np.concatenate(parts)[:100] < 1000, *DOMAINS)).all() and {*names} == {*DOMAINS}

# Boosted drafts

@pytest.fixture(scope="module")
def boost_data():
    "A tiny target, and 24 texts of 48 tokens with its states"
    base = TargetModel(tiny(V).float())
    x = torch.randint(V, (24, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(): states = base.model(input_ids=x, output_hidden_states=True).hidden_states
    return base, StateDataset(x.numpy(), {base.layers: states[base.layers].numpy()})

def small_llama(seed=0):
    from specref.models.recipe import llama
    torch.manual_seed(seed)
    return llama(1, 32, 32, V)

def series(boost_data, folder, drop, m=3, steps=60):
    base, data = boost_data
    return draft_series(small_llama, base, data, m, folder, steps, .05, drop, rows=8)

@faithful("boosted drafts", part="specref.train.boosted.agrees", plain={
    "bagging: all samples for every draft": no_drop})
def test_training_sets_are_the_unmatched_samples(subject, boost_data, tmp_path):
    "Each set is the last one without the positions where the new draft is right, and is smaller"
    base, data = boost_data
    drafts, kept = series(boost_data, tmp_path, subject)
    assert kept[0].all() and len(kept) == 4
    x, greedy = torch.from_numpy(data.x), base.head(torch.from_numpy(data.states[base.layers])).argmax(-1)
    for net, before, after in zip(drafts, kept, kept[1:]):
        right = (net(input_ids=x).logits.argmax(-1) == greedy).numpy()
        assert (after == before & ~right).all() and after.sum() < before.sum()

def test_a_series_resumes_and_seeds_differ(boost_data, tmp_path):
    "A second run reads the stored drafts; the drafts of a bag differ, and the first ones are the same"
    whole, _ = series(boost_data, tmp_path/"a", agrees, 2)
    again, _ = series(boost_data, tmp_path/"a", agrees, 2)
    bag, _ = series(boost_data, tmp_path/"b", no_drop, 2)
    def same(a, b): return all(map(torch.equal, a.parameters(), b.parameters()))
    assert all(map(same, whole, again)) and same(whole[0], bag[0])
    assert not same(whole[1], bag[1]) and not same(bag[0], bag[1])

def test_the_loss_counts_the_kept_positions_alone(boost_data):
    "The mean KL over the kept positions of the batch, by hand"
    base, data = boost_data
    net, kept = small_llama(), np.random.default_rng(0).random(data.x.shape) < .3
    loss = kept_loss(base, data, kept, rows=24)(net, 0)
    p = base.head(torch.from_numpy(data.states[base.layers])).softmax(-1)
    logq = net(input_ids=torch.from_numpy(data.x)).logits.log_softmax(-1)
    terms = [(p[n, t] * (p[n, t].log() - logq[n, t])).sum() for n, t in zip(*kept.nonzero())]
    assert torch.allclose(loss, torch.stack(terms).mean(), atol=1e-5)

class From(torch.nn.Module):
    "A draft that reads a text from its start, and answers for the positions from `first` on"
    def __init__(self, net, x, first):
        super().__init__()
        self.net, self.x, self.first = net, x, first
    def forward(self, input_ids, use_cache):
        z = self.net(input_ids=self.x).logits[:, self.first:self.first + input_ids.shape[1]]
        return SimpleNamespace(logits=z)

def greedy(model, x, n):
    for _ in range(n): x = torch.cat([x, model(input_ids=x).logits[:, -1:].argmax(-1)], 1)
    return x

@proves("prop-same-continuation")
def test_matching_in_one_pass(boost_data):
    "On greedy texts of the target: a block agrees where both models continue greedily by the same tokens"
    base, x = boost_data[0], torch.randint(V, (24, 4), generator=torch.Generator().manual_seed(2))
    x = greedy(base.model, x, 9)
    with torch.no_grad(): states = base.model(input_ids=x, output_hidden_states=True).hidden_states
    data, matches = StateDataset(x[:, 3:12].numpy(), {base.layers: states[base.layers][:, 3:12].numpy()}), 0
    for seed in range(6):
        net = small_llama(seed)
        net.load_state_dict(net.state_dict() | {"model.embed_tokens.weight": torch.randn(V, 32)})
        hits = agrees(From(net, x, 3), base, data, n=3)
        for end in (4, 7, 10):
            same = (greedy(net, x[:, :end], 3) == x[:, :end + 3]).all(1).numpy()
            assert (hits[:, end - 4:end - 1] == same[:, None]).all()
            matches += same.sum()
    assert 0 < matches < 6*3*24

def test_the_record_of_a_comparison(boost_data, tmp_path):
    "Both series share the first draft; the boosted second has fewer positions"
    base, data = boost_data
    held = StateDataset(data.x[:6], {k: states[:6] for k, states in data.states.items()})
    found = boost_record(small_llama, base, data, held, tmp_path, steps=20)
    bagged, boosted = (found[name] for name in SERIES)
    assert bagged["kept"] == [data.x.size]*3 and boosted["kept"][1] < data.x.size
    for name in ("coverage", "acceptance"):
        one, other = (np.array(part[name]) for part in (bagged, boosted))
        assert (one[:, 0] == other[:, 0]).all() and (one[:, 1] >= one[:, 0]).all() and one.shape == (6, 2)
        assert (one[:, 1] != other[:, 1]).any()
    assert (np.array(found["top"]["coverage"]) >= np.array(bagged["coverage"])[:, :1]).all()

def test_coverage_and_acceptance_by_hand(boost_data):
    base, data = boost_data
    nets = [small_llama(seed) for seed in (1, 2)]
    found, accepted = coverage(nets, base, data), sibling_acceptance(nets, base, data)
    p = base.head(torch.from_numpy(data.states[base.layers])).detach()
    q = [net(input_ids=torch.from_numpy(data.x)).logits.detach() for net in nets]
    right = [a.argmax(-1) == p.argmax(-1) for a in q]
    assert np.allclose(found[:, 0], right[0].float().mean(1)) and found.shape == (24, 2)
    assert np.allclose(found[:, 1], (right[0] | right[1]).float().mean(1))
    rows, *laws = (z[0].softmax(-1).double().numpy() for z in (p, *q))
    for j in (1, 2):
        hand = [acceptance_prob_iid(row, qs) for row, *qs in zip(rows, *laws[:j])]
        assert np.allclose(accepted[0, j - 1], np.mean(hand), atol=1e-5)
    assert (agrees(nets[0], base, data, top=V)).all()

# Merged trees

class FirstRow(MergedDrafts):
    "Wrong: all siblings state the first draft's row"
    def __call__(self, ctx, rng):
        tree = super().__call__(ctx, rng)
        rows = self.models[0](tree)
        tree.law = [law if law is None else rows[u] for law, u in zip(tree.law, tree.parent)]
        return tree

class EqualsOnce(MergedDrafts):
    "Wrong: of equal siblings only the first is there"
    def __call__(self, ctx, rng):
        tree, once, at = super().__call__(ctx, rng), Tree(ctx), {(): 0}
        for i in range(1, len(tree)):
            path = tree.path(i)
            if path not in at: at[path] = once.add(at[path[:-1]], path[-1], tree.law[i])
        return once

class LikelierFirst(MergedDrafts):
    "Wrong: the likelier of the first tokens is tried first"
    def __call__(self, ctx, rng):
        trees = [drafter(ctx, rng) for drafter in self.drafters]
        order = sorted(range(len(trees)), key=lambda j: -trees[j].law[1][trees[j].token[1]])
        return merged_tree(trees, lambda n, path: order[:n] if n == len(order) else range(n))

@faithful("boosted drafts", plain={
    "one row for all siblings": drafted(FirstRow), "equal siblings merged": drafted(EqualsOnce),
    "an order by the drawn tokens": drafted(LikelierFirst)})
@proves("thm-merged-tree")
def test_merged_trees_are_exact(subject):
    "Chains, branching trees and three drafts; both orders, whole loops"
    for seed in (0, 5):
        p, *q = (random_table(3, seed + s, zeros=False) for s in range(4))
        shapes = [(Chain(q[0], 2), Chain(q[1], 2)), (Chain(q[0], 1), Chain(q[1], 1), Chain(q[2], 1)),
                  (Chain(q[0], 1), Branching(q[1], (2,), without_replacement))]
        for drafters in shapes:
            for order in (first_to_last, uniform_order):
                system = subject(q[0], dict(drafters=drafters, order=order))
                law = loop_law(p, system.drafter, system.verify, (0,), 2)
                assert law == target_law(p, (0,), 2)

def test_the_union_of_paths():
    "a b and a c: node a once with two children, and the second a as a sibling without children"
    one, two, q = Tree((0,)), Tree((0,)), exact(1, 1, 1, 1)
    for tree, path in ((one, (1, 2)), (two, (1, 3))):
        for i, x in enumerate(path): tree.add(i, x, q)
    tree = merged_tree([one, two], lambda n, path: range(n))
    assert tree.parent == [-1, 0, 0, 1, 1] and tree.token == [None, 1, 1, 2, 3]
    assert merged_tree([two, one], lambda n, path: range(n)).token == [None, 1, 1, 3, 2]
    orders = law_of(lambda rng: tuple(uniform_order(3, rng, ())))
    assert len(orders) == 6 and {*orders.values()} == {Fr(1, 6)}

def test_a_path_prefix_is_evaluated_once():
    "The target is fed the distinct prefixes, not the sum of the lengths of all paths"
    text, nets = prompts("code", 1)[0], [embedded("small"), embedded("large"), embedded("small")]
    for seed in range(3):
        target = embedded("target")
        target(Tree(text))
        before = target.meter.tokens
        tree = MergedDrafts(tuple(Chain(net, 3) for net in nets))(text, Seeded(seed))
        assert len(tree) == 10
        target(tree)
        assert target.meter.tokens - before == len({tree.path(i) for i in range(1, 10)}) < 9

def test_the_better_draft_is_not_always_first():
    p, q1, q2 = exact(3, 2, 1), exact(1, 4, 1), exact(2, 0, 4)
    assert overlap(p, q1) == Fr(2, 3) > overlap(p, q2) == Fr(1, 2)
    target, *drafts = (TableModel(3, lambda text, row=row: row) for row in (p, q1, q2))
    def accepted(drafters, order): return round_tokens(target, MergedDrafts(drafters, order))[2]
    one, two = (Chain(q, 1) for q in drafts)
    assert accepted((one, two), first_to_last) == Fr(7, 9) == acceptance_prob_iid(p, [q1, q2])
    assert accepted((two, one), first_to_last) == Fr(11, 12)
    assert accepted((one, two), uniform_order) == Fr(61, 72)

@faithful("boosted drafts", part="MergedDrafts", plain={
    "the first draft alone": lambda drafters, order=None: drafters[0]})
@proves("prop-longest-path")
def test_greedy_merged_trees_accept_the_longest_path(subject):
    "On tables and, in double precision, on the embedded target, whose text is plain greedy text"
    target = embedded("target", torch.float64, temperature=0)
    nets = [embedded(name, torch.float64, temperature=0) for name in ("small", "large")]
    for domain in DOMAINS:
        ctx, lengths = prompts(domain, 1)[0], []
        text = autoregressive(target, ctx, 24, Seeded(0))
        drafters, at = tuple(Chain(net, 4) for net in nets), 0
        while at < 16:
            def depth(drafter):
                one = next(rounds(target, drafter, reject, ctx + text[:at], Seeded(0)))
                assert one.tokens == text[at:at + len(one.tokens)]
                return one.tree.depth[one.verdict.node]
            alone, merged = [depth(d) for d in drafters], depth(subject(drafters))
            lengths.append(alone)
            assert merged == max(alone)
            at += merged + 1
    assert any(a < b for a, b in lengths)

def test_merged_drafters_learn():
    "Each drafter learns from the round; a drafter that learns is exact inside a merged tree"
    p, q, r = (random_table(3, s) for s in (1, 2, 3))
    drafter = MergedDrafts((learning(q), Chain(r, 1)), first_to_last)
    assert loop_law(p, drafter, reject, (0,), 2) == target_law(p, (0,), 2)
    assert drafter.depth == 2 and len(drafter.models) == 2

def test_bad_input():
    q = CountedDraft(random_table(3, 1))
    refuses("most", OnlineDrafter, q, 2, most=0)
    refuses("n", lambda: next(serve(random_table(3, 0), OnlineDrafter(q, 1), reject, [(0,)], 0, Seeded(0))))
    refuses("drafters", MergedDrafts, ())
    refuses("drafters", MergedDrafts, [Chain(random_table(3, 1), 1)])

def test_bad_training_input(boost_data, tmp_path):
    base, data = boost_data
    refuses("n", agrees, small_llama(), base, data, n=7)
    refuses("top", agrees, small_llama(), base, data, top=0)
    refuses("m", draft_series, small_llama, base, data, 0, tmp_path, 10)
    refuses("domain", one_domain_draft, "french", 10, tmp_path/"x.pt")
