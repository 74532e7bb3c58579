"Shared by the tests of the verifiers: pairs of distributions from the literature, draws, stars of siblings"
import numpy as np

from specref.core.law import exact
from specref.core.tree import Tree

SGL = exact(6, 2, 1, 1), exact(14, 4, 1, 1)    # sgl-project/sglang#10308: a good draft
PEAK = exact(7, 1, 1, 1), exact(1, 6, 2, 1)    # a bad one


def as_dict(p): return {x: w for x, w in enumerate(p) if w}


def star(draw, n, rng):
    "A tree of up to `n` siblings by `draw`"
    tree = Tree((0,))
    tree.grow(0, draw, rng, n)
    return tree


def depends(seed, V, ends=0):
    "A draw whose distributions depend arbitrarily on earlier siblings; it ends with probability `ends`"
    def draw(earlier):
        rng = np.random.default_rng([seed, len(earlier), *earlier])
        w = rng.choice([0, 0, 1, 2, 5], V)
        if rng.random() < ends: return None
        return exact(*map(int, w if w.any() else w + 1))
    return draw
