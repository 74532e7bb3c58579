"The programs of a launch run together: `TRITON_INTERPRET=1 python programs_interpreted.py`"
import numpy as np
import torch
import triton
import triton.language as tl

from specref.certify.programs import SideBySide, programs_together

@triton.jit
def chain_of_three(p_ptr, q_ptr, x_ptr, u_ptr, out_ptr, V, BLOCK: tl.constexpr):
    b, k, going = tl.program_id(0), 0, 1
    while (k < 3) & (going == 1):
        x = tl.load(x_ptr + b*3 + k)
        p, q = tl.load(p_ptr + (b*4 + k)*V + x), tl.load(q_ptr + (b*3 + k)*V + x)
        if tl.load(u_ptr + b*4 + k)*q < p:
            tl.store(out_ptr + b*4 + k, x)
            k += 1
        else:
            going = 0
    v = tl.arange(0, BLOCK)
    r = tl.load(p_ptr + (b*4 + k)*V + v, mask=v < V, other=0.)
    if k < 3: r = tl.maximum(r - tl.load(q_ptr + (b*3 + k)*V + v, mask=v < V, other=0.), 0.)
    beyond = tl.cumsum(r, 0) > tl.load(u_ptr + b*4 + 3)*tl.sum(r, 0)
    tl.store(out_ptr + b*4 + k, tl.argmax(beyond.to(tl.int32), 0))

@triton.jit
def best_of_blocks(x_ptr, out_ptr, V, BLOCK: tl.constexpr):
    b, part = tl.program_id(0), tl.program_id(1)
    v = part*BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + b*V + v, mask=v < V, other=float("-inf"))
    most, at = tl.max(x, axis=0, return_indices=True)
    noise = tl.rand(7, b) if most > 0 else -1.
    tl.store(out_ptr + (b*tl.num_programs(1) + part)*2, at.to(tl.float32))
    tl.store(out_ptr + (b*tl.num_programs(1) + part)*2 + 1, noise)

@triton.jit
def reads_its_own(out_ptr):
    b = tl.program_id(0)
    tl.store(out_ptr + b, b)
    tl.store(out_ptr + b, tl.load(out_ptr + b) + 1)

@triton.jit
def counts_programs(out_ptr): tl.atomic_add(out_ptr, 1)

def chains(n, V, seed):
    rng = np.random.default_rng(seed)
    p, q = (rng.dirichlet(np.full(V, .5), (n, k)).astype(np.float32) for k in (4, 3))
    x = np.array([[rng.choice(V, p=row.astype(float)/row.sum(dtype=float)) for row in rows] for rows in q])
    return [torch.from_numpy(a) for a in (p, q, x, rng.random((n, 4), np.float32))]

def check_integers(V):
    "Chains that part at every place, with rows shorter and longer than eight columns"
    given, outs = chains(24, V, V), [torch.full((24, 4), -1) for _ in range(2)]
    chain_of_three[(24,)](*given, outs[0], V, BLOCK=64)
    with programs_together(V): chain_of_three[(24,)](*given, outs[1], V, BLOCK=64)
    assert torch.equal(*outs) and len({int((row >= 0).sum()) for row in outs[0]}) > 2

def check_two_axes():
    "Blocks along the second axis, a maximum with its place, noise by index"
    x, outs = torch.randn(12, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 12, 2, 2)
    best_of_blocks[(12, 2)](x, outs[0], 16, BLOCK=8)
    with programs_together(8): best_of_blocks[(12, 2)](x, outs[1], 16, BLOCK=8)
    assert torch.equal(outs[0], outs[1]) and len(outs[0][..., 1].unique()) > 8

def check_beginnings():
    "Forty times the programs, as many beginnings"
    def begun(n):
        before = SideBySide.begun
        with programs_together(4): chain_of_three[(n,)](*chains(n, 4, 0), torch.full((n, 4), -1), 4, BLOCK=16)
        return SideBySide.begun - before
    assert begun(400) == begun(4000) == 7

def check_refusals():
    "A program that reads what it wrote, one that counts in memory, and a launch without columns"
    out = torch.zeros(4, dtype=torch.int32)
    for kernel, columns, words in ((reads_its_own, 4, "what it has stored"), (reads_its_own, 0, "columns"),
                                   (counts_programs, 4, "atomic")):
        try:
            with programs_together(columns): kernel[(4,)](out)
        except (NotImplementedError, ValueError) as e: assert words in str(e)
        else: raise AssertionError(words)

if __name__ == "__main__":
    for V in (3, 8, 30): check_integers(V)
    for check in (check_two_axes, check_beginnings, check_refusals): check()
    print("equal")
