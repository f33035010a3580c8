"""Speed and latency over the number of sessions: what the part `sessions` measures."""

from dataclasses import dataclass

from .figures import Figure, Target, at_least, at_most, compute_median, compute_percentile


@dataclass(frozen=True)
class CurvePoint:
    """So many sessions at once, each stepping as fast as it is answered."""

    num_sessions: int
    steps_per_second: float
    median_seconds: float
    p95_seconds: float

    @classmethod
    def of(cls, num_sessions: int, step_seconds: list[float], seconds: float) -> "CurvePoint":
        """Sum up the seconds of every step, and those that all of them took together."""
        return cls(
            num_sessions,
            len(step_seconds) / seconds,
            compute_median(step_seconds),
            compute_percentile(step_seconds, 95),
        )


@dataclass(frozen=True)
class SessionsCurve:
    """The points in order of sessions, and plain transformers by the rows of its batch."""

    points: tuple[CurvePoint, ...]
    reference_tokens_per_second: dict[int, float]

    def to_figures(self) -> list[Figure]:
        """Return the table, and the figures that have targets behind their points."""
        figures = [
            Figure(f"plain transformers, batch of {num_rows}", speed, "tok/s")
            for num_rows, speed in self.reference_tokens_per_second.items()
        ]
        for point in self.points:
            name = f"{point.num_sessions} session{'s' if point.num_sessions > 1 else ''}"
            figures += [
                Figure(f"{name}, together", point.steps_per_second, "steps/s"),
                Figure(f"{name}, median step", 1000 * point.median_seconds, "ms"),
                Figure(f"{name}, 95th percentile", 1000 * point.p95_seconds, "ms"),
            ]
        return [*figures, *self._compare(1, at_least(2)), *self._compare(16, at_least(1)),
                *self._compare_percentiles(8)]  # fmt: skip

    def find(self, num_sessions: int) -> CurvePoint | None:
        """Return the point of so many sessions."""
        return next((point for point in self.points if point.num_sessions == num_sessions), None)

    def _compare(self, num_rows: int, target: Target) -> list[Figure]:
        point, reference = self.find(num_rows), self.reference_tokens_per_second.get(num_rows)
        if point is None or reference is None:
            return []
        name = f"sessions: {num_rows}, ratio to a batch of {num_rows}"
        return [Figure(name, point.steps_per_second / reference, "x", target)]

    def _compare_percentiles(self, num_sessions: int) -> list[Figure]:
        alone, together = self.find(1), self.find(num_sessions)
        if alone is None or together is None:
            return []
        name = f"sessions: {num_sessions}, 95th percentile to that of one"
        return [Figure(name, together.p95_seconds / alone.p95_seconds, "x", at_most(3))]
