"""What a step of a replica costs, learnt from the times of our own calls.

A call that sampled ``steps`` tokens while its replica sampled ``sampled`` and prefilled
``prefilled`` tokens took about ``a·steps + c·sampled + p·prefilled`` seconds. Least squares over
recent calls, no coefficient below zero. Where the figures cannot tell two of them apart (the batch
never changes), their sum is still right where it was measured.
"""

from itertools import combinations

from stoker.coordinator.fluid import StepCost

_FORGET = 0.998
"""Weight of what was known, per call: the last five hundred count."""
_CALLS_MIN = 30
_RIDGE = 1e-9
_TERMS = 3

_Row = tuple[float, float, float]


class StepCosts:
    """Running sums of the fit."""

    def __init__(self) -> None:
        self._products = [[0.0] * _TERMS for _ in range(_TERMS)]
        self._targets = [0.0] * _TERMS
        self._calls = 0

    def seen(self, *, steps: int, sampled: int, prefilled: int, seconds: float) -> None:
        """Count one answered call."""
        row = (float(steps), float(sampled), float(prefilled))
        self._calls += 1
        for i, left in enumerate(row):
            self._targets[i] = _FORGET * self._targets[i] + left * seconds
            products = self._products[i]
            for j, right in enumerate(row):
                products[j] = _FORGET * products[j] + left * right

    def cost(self) -> StepCost | None:
        """Return the fit; ``None`` before there were enough calls."""
        if self._calls < _CALLS_MIN:
            return None
        subsets = [s for size in (3, 2, 1) for s in combinations(range(_TERMS), size)]
        fits = [fit for subset in subsets if (fit := self._fit(subset)) is not None]
        return StepCost(*max(fits, key=self._explained)) if fits else None

    def _explained(self, fit: _Row) -> float:
        """Return by how much the fit lowers the sum of squares, up to a constant."""
        linear = sum(2 * fit[i] * self._targets[i] for i in range(_TERMS))
        square = sum(
            fit[i] * fit[j] * self._products[i][j] for i in range(_TERMS) for j in range(_TERMS)
        )
        return linear - square

    def _fit(self, terms: tuple[int, ...]) -> _Row | None:
        """Solve for ``terms`` alone; ``None`` where one of them is below zero."""
        rows = [
            [self._products[i][j] * (1 + _RIDGE * (i == j)) for j in terms] + [self._targets[i]]
            for i in terms
        ]
        size = len(terms)
        for column in range(size):
            pivot = rows[column]
            if pivot[column] <= 0:
                return None
            for row in rows[column + 1 :]:
                factor = row[column] / pivot[column]
                for k in range(column, size + 1):
                    row[k] -= factor * pivot[k]
        found = [0.0] * _TERMS
        for column in reversed(range(size)):
            known = sum(rows[column][k] * found[terms[k]] for k in range(column + 1, size))
            found[terms[column]] = (rows[column][size] - known) / rows[column][column]
        return (found[0], found[1], found[2]) if min(found) >= 0 else None
