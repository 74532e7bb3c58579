"A system by its name: what its chapter declares, and the parts that this reaches"
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property, partial
from importlib import import_module
from types import CodeType, FunctionType, MethodType, ModuleType

import house
from specref.core.registry import declared

def same(built): return built

@dataclass(frozen=True)
class Published:
    """The system of a name; `change` puts something plainer into what is declared under it, and
    `instead` is another system's name, whose declaration is taken"""
    name: str
    change: object = same
    instead: str = None
    @property
    def key(self): return self.instead or self.name
    @property
    def entry(self): return declared(self.key)
    @property
    def method(self):
        "What is declared that is no system"
        return self.change(self.entry.build)
    @property
    def recipe(self):
        "How the network of a trained drafter is made and trained"
        return self.change(self.entry.recipe)
    def shipped(self):
        "The network of a trained drafter with its weights"
        from specref.train.registry import load_network
        return self.change(load_network(self.entry.recipe.name))
    def __call__(self, draft, values=(), **how):  # -> System
        "The system on any draft model; `values` of its drafter that differ from those declared"
        system = self.entry.build(draft, **how)
        if values: system = replace(system, drafter=replace(system.drafter, **dict(values)))
        return self.change(system)
    def drafter(self, draft, values=(), **how): return self(draft, values, **how).drafter
    def on(self, target, draft=None, values=(), **how):  # -> target, System
        "Target and system with what drafts for this target: the source of the commands"
        from specref.app.loading import source_of
        made = source_of(self.key)(target, draft)
        how = dict(temperature=target.temperature) | made.options | how
        return made.target, self(made.draft or made.target, values, **how)

# Plainer systems

def verified(verify): return lambda system: replace(system, verify=verify)

def drafted(make):
    "A system with another drafter, made of the published one; a class takes its values"
    return lambda system: replace(system, drafter=maker(make)(system.drafter))

def having(**makes):
    "A system whose drafter has other values, each made of the published one; a class takes its values"
    def made(drafter): return {name: maker(make)(getattr(drafter, name)) for name, make in makes.items()}
    return drafted(lambda drafter: replace(drafter, **made(drafter)))

def maker(make):
    if not isinstance(make, type): return make
    return lambda part: make(**{f.name: getattr(part, f.name) for f in fields(part) if f.init})

def rebound(function, **others):
    "The function, with others instead of those that it names"
    if missing := others.keys() - set(names_in(function.__code__)):
        raise LookupError(f"{function.__name__} does not name {', '.join(missing)}")
    new = FunctionType(function.__code__, function.__globals__ | others, function.__name__,
                       function.__defaults__, function.__closure__)
    new.__kwdefaults__ = function.__kwdefaults__
    return new

# Parts

def part_of(system, name):
    "The function or class of this name that the system reaches, or one of `house.UNREACHED`"
    if (system, name) in house.UNREACHED:
        module, _, own = name.rpartition(".")
        return getattr(import_module(module), own)
    found = {id(x): x for x in reached(system) if getattr(x, "__name__", None) == name}
    for x in [*found.values()]: found.pop(id(getattr(x, "__wrapped__", None)), None)
    if len(found) != 1: raise LookupError(f"{system!r} reaches {len(found)} parts {name!r}")
    return next(iter(found.values()))

@cache
def reached(system):  # -> objects
    "What the declaration of a system names, and what trains the network that it loads"
    some = closure(vars(declared(system)).values())
    return closure([*some, *trainers(some)])

def trainers(some):
    "The training of what is loaded: functions of `EMBEDDED_TRAINING`, in the modules that are reached"
    modules = {x.__module__ for x in some if ours(x)}
    if not any("torch" in vars(sys.modules[m]) for m in modules): return []
    table = import_module("specref.train.registry").EMBEDDED_TRAINING
    return [train for what, train in table.items() if what and train.__module__ in modules]

NAMED = {}   # id: an object and its parts, so that each is looked at once

def closure(todo):
    seen, todo = {}, list(todo)
    while todo:
        x = todo.pop()
        if id(x) in seen: continue
        seen[id(x)] = x
        if id(x) not in NAMED: NAMED[id(x)] = x, parts_of(x)
        todo += NAMED[id(x)][1]
    return list(seen.values())

def ours(x): return (getattr(x, "__module__", None) or "").startswith("specref.")

def parts_of(x):  # -> list
    "What an object of the package names, holds or is made of"
    if isinstance(x, partial): return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, (tuple, list)): return list(x)
    if isinstance(x, (staticmethod, classmethod, MethodType)): return [x.__func__]
    if isinstance(x, property): return [x.fget]
    if isinstance(x, cached_property): return [x.func]
    if hasattr(x, "__wrapped__"): return [x.__wrapped__]
    if not ours(x): return []
    if isinstance(x, FunctionType): return [*held_by(x), *named_by(x)]
    if isinstance(x, type): return [*x.__bases__, *vars(x).values()]
    return [type(x), *(vars(x).values() if is_dataclass(x) else ())]

def held_by(function):
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]

def named_by(function):
    "Functions, classes and values that its code names, also those that it imports"
    names, scope = names_in(function.__code__), function.__globals__
    for name in names:
        if name.startswith("specref."): scope = vars(import_module(name)) | scope
        if isinstance(scope.get(name), ModuleType) and scope[name].__name__.startswith("specref."):
            scope = vars(scope[name]) | scope
    return [scope[name] for name in names if name in scope and not isinstance(scope[name], dict)]

def names_in(code):
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in names_in(c)]
    return [*code.co_names, *inner]
