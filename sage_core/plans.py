"""Plans: what serves the calls of one patched model, kept for the next ones like them, and who lost which site."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .call import CallKey
from .refusal import Refusal
from .selection import Plan, Verdict
from .session import Session

MAX_PLANS = 20_000
"""Plans kept per model; a queue with ever new resolutions starts afresh beyond it."""

Place = tuple[int, "Refusal | None"]
"""Where in a forward a call is, and what keeps it native there."""


class Plans:
    """The plans of one patched model; threads may use it at once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._generation = session.generation
        self.known: dict[CallKey | None, dict[Place, Plan]] = {}
        """By what is alike first: that many keys stay in the processor's cache, a key for each site would not."""
        self._count = 0
        self._banned: dict[tuple[CallKey, Place], tuple[Verdict, ...]] = {}
        self.bans = 0
        """How often a site lost a kernel."""

    def keep(self, key: CallKey, place: Place, plan: Plan) -> None:
        if self._count >= MAX_PLANS:
            self.forget()
        self.known.setdefault(key, {})[place] = plan
        self._count += 1

    def forget(self) -> None:
        """Have every call planned anew; what lost its site stays away from it."""
        self.known.clear()
        self._count = 0

    def forget_retired(self) -> None:
        """Drop the plans made before a kernel was retired, by this model or another: they may name it."""
        generation = self._session.generation
        if self._generation != generation:
            self._generation = generation
            self.forget()

    def drop(self, kernel: str) -> None:
        """Have the calls of a kernel planned anew, in the forward that is under way too; the others wait for its end,
        where they may still have to be found."""
        for alike in list(self.known.values()):
            for place in [place for place, plan in list(alike.items()) if plan.kernel == kernel]:
                alike.pop(place, None)

    def ban(self, plans: Iterable[Plan], refusal_of: Callable[[Plan], Refusal]) -> None:
        """Keep each plan's kernel from its site; the next call there is planned without it."""
        banned = set(plans)
        if len(self._banned) >= MAX_PLANS:
            self._banned.clear()
        for key, alike in list(self.known.items()):  # other threads go on planning
            for place in [place for place, plan in list(alike.items()) if plan in banned]:
                plan = alike.pop(place, None)
                if plan is None:  # another thread was first
                    continue
                self.bans += 1
                verdict = Verdict(plan.kernel, (refusal_of(plan),))
                if key is not None:
                    self._banned[key, place] = (*self.banned(key, place), verdict)

    def banned(self, key: CallKey, place: Place) -> tuple[Verdict, ...]:
        """The kernels that lost this site, and why."""
        return self._banned.get((key, place), ())
