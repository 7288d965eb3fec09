"""Formulas: columns that are the same at every site, because knots, means and levels come from all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin

from fednmap.names import InputError
from fednmap.tables.statistics import (
    NARROWINGS,
    Answers,
    FederatedPreprocessor,
    Question,
    Statistic,
    answer,
    by_site,
    carry,
    known_values,
    order_statistics,
)
from fednmap.tables.table import Column, SiteError, Table, is_words, missing, table

Floats = npt.NDArray[np.float64]

ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "log": np.log,
    "log10": np.log10,
    "log2": np.log2,
    "exp": np.exp,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "I": lambda x: x,
}
"""Functions of one row at a time."""
LARGEST = float(np.finfo(np.float64).max)
SPLINE = ("df", "knots", "degree", "include_intercept", "lower_bound", "upper_bound", "extrapolation")
SCALED: dict[str, tuple[str, ...]] = {
    "center": (),
    "scale": ("center", "scale", "ddof"),
    "standardize": ("center", "rescale", "ddof"),
}
"""Functions with a state, and the names of their arguments after the first."""
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.unaryop)
ALLOWED = (ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, *OPERATORS, ast.Load, ast.Call)
MOST = 2000  # terms of a formula


class _Call(NamedTuple):
    """A function with a state: what it is of, and its other arguments."""

    function: str
    inner: str
    arguments: dict[str, Any]


@dataclass(eq=False, repr=False)
class FederatedFormula(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """The columns of a formula such as "y ~ x1 * x2 + bs(age, 4) + C(stage)", the same at every site.

    Interactions, `log`, `log10`, `log2`, `exp`, `sqrt`, `abs`, `I`, `C` (levels of all sites), `center`, `scale`,
    `standardize` (mean and deviation of all sites) and `bs` (bounds and quantiles of all sites, as in R's splines) are
    known. Other functions are refused: what they compute of one site's rows would differ from site to site. The
    intercept is the estimator's. Every site sends what `FederatedPreprocessor` sends, and for `bs` the least and
    greatest value and counts of values below a number.

    Raises InputError for what cannot be done, and for gaps.

    >>> a, b = {"age": [50.0, 40.0], "sex": ["f", "m"]}, {"age": [70.0, 60.0], "sex": ["f", "x"]}
    >>> fitted = FederatedFormula("~ center(age) + sex").fit({"basel": a, "bern": b})
    >>> [str(name) for name in fitted.get_feature_names_out()]
    ['center(age)', 'sex[T.m]', 'sex[T.x]']
    >>> fitted.transform(a)[:, 0]
    array([ -5., -15.])
    """

    formula: str = ""

    def fit(self, X: Any, y: Any = None, sites: Any = None) -> Self:
        """Fit to a mapping of site names to frames, or to one frame and the site of each of its rows."""
        tables = {t.name: self.variables(t) for t in by_site(X, sites)}
        return self.know(*carry(self.conversation(), lambda q: {name: answer(q, t) for name, t in tables.items()}))

    def conversation(self) -> Generator[Question, Answers, tuple[tuple[Statistic, ...], dict[str, Any]]]:
        """Yield the questions that `fit` asks the sites; return what `know` takes. Wrong columns raise InputError."""
        parsed, state = self._parsed(), dict[str, Any]()
        statistics = yield from FederatedPreprocessor(categorical=parsed.categories).conversation()
        known = {s.column: s for s in statistics}
        for s in statistics:
            if s.kind != "number" and s.column not in parsed.plain | {*parsed.categories}:
                raise InputError(f"expected numbers in {s.column!r}, got words; use C({s.column})")
            if s.missing:
                raise InputError(f"column {s.column!r} has {s.missing} gaps; leave the rows out, or fill them")
        inner = list(dict.fromkeys(call.inner for call in parsed.calls.values()))
        if not inner:
            return statistics, state
        said = yield {"ask": "counts", "cuts": {inner[0]: [LARGEST]}}
        n = sum(part[inner[0]][0] for part in said.values())
        for key, call in parsed.calls.items():
            s, given = known[call.inner], call.arguments
            if call.function == "bs":
                state[key] = yield from _spline(key, call, n)
                continue
            centred = bool(given.get("center", True))
            ddof = given.get("ddof", 0 if call.function == "standardize" else 1)
            if ddof >= n:
                raise InputError(f"expected ddof below the {n} rows of all sites in {key}, got {ddof}")
            spread = given.get("rescale", given.get("scale", call.function != "center"))
            size = float(np.sqrt((s.scale**2 + (0.0 if centred else s.mean**2)) * n / (n - ddof)))
            state[key] = {"ddof": ddof, "center": s.mean if centred else None, "scale": size if spread else None}
        return statistics, state

    def know(self, statistics: Sequence[Statistic], state: Mapping[str, Any]) -> Self:
        """Set the fitted attributes from known statistics and states of functions; return self."""
        self.statistics_, self.state_ = tuple(statistics), dict(state)
        example = {s.column: np.array([s.levels[0]], object) if s.levels else np.array([s.mean]) for s in statistics}
        anywhere = {"lower_bound": -LARGEST, "upper_bound": LARGEST}  # where the example is does not matter
        wide = {key: value | anywhere if "knots" in value else value for key, value in self.state_.items()}
        frame, terms = self._matrix(Table({name: example[name] for name in self._parsed().variables}), wide)
        self.names_ = [str(name) for name in frame.columns]
        self._terms = {str(t): [self.names_[j - 1] for j in places] for t, places in terms.items() if t != "1"}
        return self

    def transform(self, X: Any) -> Floats:
        """Return a frame as numbers: the columns of the formula without the intercept."""
        found: Floats = self.frame(X).to_numpy(float)
        return found

    def frame(self, X: Any) -> Any:
        """Return `transform` as a pandas frame with names; numbers that are not finite raise SiteError."""
        rows = table(X, only=self._parsed().variables)
        found = self._matrix(rows, self.state_)[0]
        bad = ~np.isfinite(found.to_numpy(float))
        if bool(bad.any()):
            row, j = (int(k) for k in np.argwhere(bad)[0])
            message = f"{rows.where}{found.columns[j]!r} is not finite in row {row}; leave the row out"
            raise SiteError(message, "infinite", str(found.columns[j]))
        return found

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[np.object_]:
        """Return the names of the columns that `transform` makes."""
        return np.array(self.names_, object)

    def groups(self) -> dict[str, list[str]]:
        """Return the columns of each term, for a group penalty."""
        return self._terms

    @property
    def target(self) -> list[str]:
        """The columns on the left: one, those of Surv(time, event) or Surv(start, stop, event), or none."""
        left = self._parsed().left
        if left is None:
            return []
        tree = _tree(left) if left.isidentifier() or "(" in left else None
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "Surv":
            if len(tree.args) in (2, 3) and all(isinstance(part, ast.Name) for part in tree.args):
                return [part.id for part in tree.args if isinstance(part, ast.Name)]
        elif tree is None or isinstance(tree, ast.Name):
            return [left]
        raise InputError(f"expected a column or Surv(time, event) before ~, got {left!r}; compute it as a column")

    def response(self, X: Any) -> Column | None:
        """Return the columns on the left of a frame, (N,), (N, 2) or (N, 3); None where the formula has none."""
        found = table(X, only=self.target)
        parts = [found[name] for name in self.target]
        return None if not parts else parts[0] if len(parts) == 1 else np.stack(parts, 1)

    @property
    def asked(self) -> dict[str, set[str]]:
        """Return of which columns `conversation` asks ranges, counts, and the number of rows."""
        calls = self._parsed().calls.values()
        splines = {call.inner for call in calls if call.function == "bs"}
        return {"ranges": splines, "counts": splines, "rows": {call.inner for call in [*calls][:1]}}

    @property
    def with_numbers(self) -> list[str]:
        """Return the factors in which a number stands that is computed with, and knots and bounds that are given."""
        found, parsed = [], self._parsed()
        for factor in {str(f.expr): f for term in parsed.right for f in term.factors}:
            call = parsed.calls.get(factor)
            inner = factor if call is None else call.inner
            given = call is not None and any("bound" in word or word == "knots" for word in call.arguments)
            constants = (isinstance(node, ast.Constant) for node in ast.walk(_tree(inner)))
            found += [factor] if given or (factor not in parsed.plain and factor != "1" and any(constants)) else []
        return found

    @property
    def narrowings(self) -> int:
        """How often `conversation` asks for counts."""
        inside = (c.arguments.get("df") or 0 for c in self._parsed().calls.values() if c.function == "bs")
        return 1 + 2 * NARROWINGS * sum(inside)

    def variables(self, rows: Table) -> Table:
        """Return the columns of the formula, and the arguments of its functions that have a state."""
        parsed = self._parsed()
        used = {name: rows[name] for name in parsed.variables}
        inner = {call.inner: _evaluated(call.inner, rows) for call in parsed.calls.values() if call.inner not in used}
        return Table(used | inner, rows.name)

    def complete(self, rows: Table) -> npt.NDArray[np.bool_]:
        """Return the rows without a gap in any column of the formula, its left side too."""
        gaps = [missing(rows[name]) for name in [*self._parsed().variables, *self.target]]
        return ~np.any(gaps, axis=0) if gaps else np.ones(rows.rows, bool)

    def _matrix(self, rows: Table, known_state: Mapping[str, Any]) -> Any:
        """The columns without the intercept, and where each term is among all of them."""
        parsed, known = self._parsed(), {s.column: s for s in self.statistics_}
        pandas, formulaic = _packages()
        columns = {}
        for name in parsed.variables:
            s, gaps = known[name], missing(rows[name])
            if bool(gaps.any()):
                message = f"{rows.where}column {name!r} has no value in row {int(gaps.argmax())}; leave the row out"
                raise SiteError(message, "gaps", name)
            values = known_values(s, rows)
            columns[name] = values if s.kind == "number" else pandas.Categorical(values, list(s.levels))
        state = {key: dict(value) for key, value in known_state.items()}
        spec = formulaic.ModelSpec(formula=parsed.right, transform_state=state, na_action="ignore")
        frame = pandas.DataFrame(columns, index=range(rows.rows))
        try:
            with np.errstate(all="ignore"):
                found = spec.get_model_matrix(frame, context=ELEMENTWISE)
        except Exception as error:  # formulaic has several kinds
            said = " ".join(str(error).split())
            if "beyond upper" in said:
                said = "rows lie beyond the bounds of bs; write bs(..., extrapolation='extend'), or leave them out"
            raise InputError(f"{rows.where}the formula cannot be computed: {said[:160]}") from None
        return found.drop(columns="Intercept"), found.model_spec.term_indices

    def _parsed(self) -> _Parsed:
        return _parse(self.formula)


def _spline(key: str, call: _Call, n: int) -> Generator[Question, Answers, dict[str, Any]]:
    """Bounds and knots of bs: the ends of n values of all sites, and quantiles as R's default has them."""
    given, degree = call.arguments, int(call.arguments.get("degree", 3))
    inside = given["df"] - degree - bool(given.get("include_intercept")) if given.get("df") else 0
    if inside < 0 or (given.get("df") and given.get("knots") is not None):
        raise InputError(f"expected df of at least {degree}, or knots, in {key}; give one of them")
    said = yield {"ask": "ranges", "columns": [call.inner]}
    low = given.get("lower_bound", min(part[call.inner][0] for part in said.values()))
    high = given.get("upper_bound", max(part[call.inner][1] for part in said.values()))
    knots = [*map(float, given.get("knots") or ())]
    for place in (n - 1) * np.linspace(0, 1, inside + 2)[1:-1]:
        below = (yield from order_statistics({call.inner: np.floor(place) + 1}))[call.inner]
        above = (yield from order_statistics({call.inner: np.ceil(place) + 1}))[call.inner]
        knots.append(below + (place - np.floor(place)) * (above - below))
    return {
        "lower_bound": low,
        "upper_bound": high,
        "knots": [*[low] * (degree + 1), *knots, *[high] * (degree + 1)],
    }


class _Parsed(NamedTuple):
    left: str | None
    right: Any
    variables: list[str]
    plain: set[str]
    """Columns that stand by themselves: words or numbers."""
    categories: list[str]
    calls: dict[str, _Call]
    """Functions with a state, by how formulaic writes them."""


def _parse(formula: str) -> _Parsed:
    """What a formula needs; functions that are not known are refused, so that nothing else is evaluated."""
    _, formulaic = _packages()
    _check_size(formula)
    try:
        found = formulaic.Formula(formula)
    except Exception as error:  # formulaic has several kinds, all about the words
        words = re.sub(r"\x1b\[[0-9;]*m", "", " ".join(str(error).split()))
        raise InputError(f"{formula!r:.80} is not a formula: {words[:120]}") from None
    sides = getattr(found, "lhs", None), getattr(found, "rhs", found)
    if not all(side is None or isinstance(side, formulaic.SimpleFormula) for side in sides):
        raise InputError(f"expected one formula, got several parts in {formula!r:.80}; leave '|' out")
    if sides[0] is not None and len(sides[0]) != 1:
        raise InputError(f"expected one column before ~, got {len(sides[0])} in {formula!r:.80}")
    left = None if sides[0] is None else str(next(iter(sides[0])).factors[0].expr)
    if "1" not in [str(term) for term in sides[1]]:
        raise InputError("a formula without an intercept is not known; use fit_intercept=False, and leave '- 1' out")
    if any("Intercept" in map(str, term.factors) for term in sides[1]):
        raise InputError("expected other columns than 'Intercept', the name of the constant one; rename it")
    variables: dict[str, None] = {}
    plain, categories, calls = set[str](), dict[str, None](), dict[str, _Call]()
    for factor in (f for term in sides[1] for f in term.factors):
        kind = factor.eval_method.value
        if kind == "literal":
            continue
        if kind == "lookup":
            variables[factor.expr] = None
            plain.add(factor.expr)
            continue
        call = _call(factor.expr, categories)
        if call is not None:
            calls[factor.expr] = call
        for name in _names(factor.expr):
            variables[name] = None
    if not variables:
        raise InputError(f"expected columns after ~, got none in {formula!r:.80}; name some")
    both = (plain | {n for call in calls.values() for n in _names(call.inner)}) & {*categories}
    if both:
        name = sorted(both)[0]
        raise InputError(f"expected {name!r} either as C({name}) or as a number, got both; use one of them")
    return _Parsed(left, sides[1], list(variables), plain, list(categories), calls)


def _check_size(formula: str) -> None:
    """Refuse a formula that expands to too many terms, before it is expanded."""
    words = re.sub(r"`[^`]*`|(?<![\w.])[^\W\d][\w.]*", "q", formula).replace("^", "**")
    words = re.sub("%q%|:", "@", words)
    try:
        sizes = [_terms(ast.parse(f"({side})", mode="eval").body) for side in words.split("~") if side.strip()]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        sizes = [MOST * ("*" in words) + len(words) // 9]  # formulaic says what is wrong, if that does not take long
    if sum(sizes) > MOST:
        raise InputError(f"{formula!r:.80} is not a formula, or has more than {MOST} terms; use fewer * and **")


def _terms(tree: ast.expr) -> int:
    """A bound on the number of terms that an expression of a formula expands to."""
    rest = 0
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add | ast.Sub):  # a long sum is a deep tree
        rest += _terms(tree.right)
        tree = tree.left
    if isinstance(tree, ast.UnaryOp):
        return rest + _terms(tree.operand)
    if not isinstance(tree, ast.BinOp):
        return rest + 1
    left, right = _terms(tree.left), _terms(tree.right)
    if isinstance(tree.op, ast.Pow):
        times = getattr(tree.right, "value", None)
        return rest + (max(left, 2) ** times if type(times) is int and times < 12 else MOST + 1)
    return rest + left + right + left * right


def _is_right(word: str, value: Any) -> bool:
    """Whether an argument of a function with a state is of its kind."""
    if word in ("df", "degree", "ddof"):
        return type(value) is int and 0 <= value <= 1000
    if word == "knots":
        return isinstance(value, list | tuple) and len(value) <= 1000 and all(_is_right("bound", v) for v in value)
    if "bound" in word:
        return type(value) in (int, float) and abs(value) <= LARGEST
    return isinstance(value, str if word == "extrapolation" else bool)


def _call(expression: str, categories: dict[str, None]) -> _Call | None:
    """The function with a state that a factor is, None where it has none; levels are added to the categories."""
    tree = _tree(expression)
    name = tree.func.id if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) else ""
    if name == "C" and isinstance(tree, ast.Call):
        if len(tree.args) != 1 or tree.keywords or not isinstance(tree.args[0], ast.Name):
            raise InputError(f"expected C(column), got {expression}; the first level is the reference")
        categories[tree.args[0].id] = None
        return None
    if (name != "bs" and name not in SCALED) or not isinstance(tree, ast.Call):
        _check_elementwise(tree, expression)
        return None
    words = SPLINE if name == "bs" else SCALED[name]
    if not tree.args or len(tree.args) > len(words) + 1 or any(k.arg not in words for k in tree.keywords):
        raise InputError(f"expected {name}(column{', ' if words else ''}{', '.join(words)}), got {expression}")
    _check_elementwise(tree.args[0], expression)
    try:
        given = {word: ast.literal_eval(part) for word, part in zip(words, tree.args[1:], strict=False)}
        given |= {str(k.arg): ast.literal_eval(k.value) for k in tree.keywords}
    except ValueError:
        raise InputError(f"expected numbers as arguments of {name}, got {expression}") from None
    for word, value in given.items():
        if value is not None and not _is_right(word, value):
            raise InputError(f"{word} of {name} cannot be {value!r:.40}; give whole numbers up to 1000, or numbers")
    return _Call(name, ast.unparse(tree.args[0]), given)


def _check_elementwise(tree: ast.AST, expression: str) -> None:
    """Refuse what is not arithmetic of columns, numbers and `ELEMENTWISE` functions."""
    for node in ast.walk(tree):
        known = not isinstance(node, ast.Call) or (
            isinstance(node.func, ast.Name)
            and node.func.id in ELEMENTWISE
            and len(node.args) == 1
            and not node.keywords
        )
        constant = not isinstance(node, ast.Constant) or isinstance(node.value, int | float)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _names(ast.unparse(node)):
            parts = [getattr(part, "value", None) for part in (node.left, node.right)]  # such as 10**6
            constant = all(isinstance(part, int | float) and part <= 100 for part in parts)  # a tower has no end
        if not isinstance(node, ALLOWED) or not known or not constant:
            functions = ", ".join(("C", "bs", *SCALED, *ELEMENTWISE))
            raise InputError(f"{expression!r:.60} cannot be computed alike at all sites; known functions: {functions}")


def _tree(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError:
        raise InputError(
            f"{expression!r:.60} is no expression; rename columns whose names have other signs than _"
        ) from None


def _names(expression: str) -> list[str]:
    """The columns of an expression."""
    nodes = list(ast.walk(_tree(expression)))
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    return [node.id for node in nodes if isinstance(node, ast.Name) and node not in functions]


def _evaluated(expression: str, rows: Table) -> Column:
    """An elementwise expression of a table's columns; it has been checked."""
    columns = {name: rows[name] for name in _names(expression)}
    if words := [name for name, values in columns.items() if is_words(values)]:
        raise SiteError(f"{rows.where}column {words[0]!r} holds words; numbers are needed", "words", words[0])
    _check_elementwise(_tree(expression), expression)
    with np.errstate(all="ignore"):
        found = eval(compile(expression, "formula", "eval"), {"__builtins__": {}}, {**ELEMENTWISE, **columns})
    return np.asarray(found, float)


def _packages() -> Any:
    try:
        import formulaic
        import pandas
    except ModuleNotFoundError:
        raise InputError("a formula needs formulaic: pip install 'fednmap[formula]'") from None
    return pandas, formulaic
