"Mistakes planted in a function: each names one operation of its syntax tree, whatever the layout"
import ast, inspect, linecache, textwrap
from copy import deepcopy
from itertools import count
from unittest import mock

OTHERWISE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
NUMBERS = count()

def parsed(code):
    "An expression or a statement"
    part, = ast.parse(code).body
    return part.value if isinstance(part, ast.Expr) else part

def fits(pattern, node, found):
    "Whether a node is the pattern, in which a name that begins with _ stands for anything"
    if isinstance(pattern, ast.Name) and pattern.id[0] == "_":
        return ast.dump(found.setdefault(pattern.id, node)) == ast.dump(node)
    if type(pattern) is not type(node): return False
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(fits(*pair, found) for pair in zip(pattern, node))
    if not isinstance(pattern, ast.AST): return pattern == node
    return all(fits(getattr(pattern, field), getattr(node, field), found)
               for field in pattern._fields if field != "ctx")

class Swapped(ast.NodeTransformer):
    "A tree with each node for which `change` returns another one; `times` counts them"
    def __init__(self, change): self.change, self.times = change, 0
    def visit(self, node):
        new = self.change(node)
        self.times += new is not None
        return self.generic_visit(node) if new is None else new

# Changes: a node -> another one, or None

def instead(old, new):
    "One expression or statement in place of another, with what its _ stand for"
    old, new = parsed(old), parsed(new)
    def change(node):
        found = {}
        if fits(old, node, found):
            return Swapped(lambda x: found.get(getattr(x, "id", None))).visit(deepcopy(new))
    return change

def always(condition): return instead(condition, "True")
def never(condition): return instead(condition, "False")

def at_equality(comparison):
    "A comparison that decides otherwise where both sides are equal: < is <=, >= is >"
    comparison = parsed(comparison)
    def change(node):
        if fits(comparison, node, {}):
            return ast.Compare(node.left, [OTHERWISE[type(node.ops[0])]()], node.comparators)
    return change

def without(part):
    "One operand of two, or a statement, is left out"
    operand, (statement,) = parsed(part), ast.parse(part).body
    def change(node):
        if fits(statement, node, {}): return ast.Pass()
        if isinstance(node, ast.BinOp):
            if fits(operand, node.left, {}): return node.right
            if fits(operand, node.right, {}): return node.left
    return change

def given(function, old, new):
    "An argument of a call, another expression in its place"
    old = parsed(old)
    def change(node):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            at = [fits(old, x, {}) for x in node.args].index(True)
            return ast.Call(node.func, [*node.args[:at], parsed(new), *node.args[at + 1:]], node.keywords)
    return change

def planted(f, change):
    "The function, or kernel, with the change, which must be possible at one place"
    f = inspect.unwrap(getattr(f, "fn", f))
    swapped = Swapped(change)
    source = ast.unparse(swapped.visit(ast.parse(textwrap.dedent(inspect.getsource(f)))))
    if swapped.times != 1: raise ValueError(f"change: got {swapped.times} places in {f.__name__}, wanted one")
    file, scope = f"<{f.__name__} {next(NUMBERS)}>", {}
    linecache.cache[file] = len(source), None, source.splitlines(True), file   # Triton reads it
    exec(compile(source, file, "exec"), f.__globals__, scope)
    return scope[f.__name__]

def plant(owner, name, change):
    "Inside, a module or class has the changed function"
    return mock.patch.object(owner, name, planted(getattr(owner, name), change))
