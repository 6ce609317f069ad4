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
        self.known: dict[bool | None, dict[CallKey | None, dict[Place, Plan]]] = {None: {}, False: {}, True: {}}
        """By whether the host limits the forward, None before that was measured; then by what is alike: that many keys
        stay in the processor's cache, a key for each site would not."""
        self._count = 0
        self._banned: dict[tuple[CallKey, Place], tuple[Verdict, ...]] = {}
        self.bans = 0
        """How often a site lost a kernel, for good or to be planned anew."""

    def keep(self, key: CallKey, place: Place, plan: Plan, host_bound: bool | None) -> None:
        """Keep a plan made in a forward with that limit for every forward that it holds in: any, where the choice does
        not rest on the limit, and those limited as was guessed, once that is known."""
        if self._count >= MAX_PLANS:
            self.forget()
        for each in self.known if plan.host_bound is None else {host_bound, plan.host_bound}:
            self.known[each].setdefault(key, {})[place] = plan
        self._count += 1

    def forget(self) -> None:
        """Have every call planned anew; what lost its site stays away from it."""
        for known in self.known.values():
            known.clear()
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
        for _, alike in self._all():
            for place in [place for place, plan in list(alike.items()) if plan.kernel == kernel]:
                alike.pop(place, None)
                self.bans += 1

    def ban(self, plans: Iterable[Plan], refusal_of: Callable[[Plan], Refusal]) -> None:
        """Keep each plan's kernel from its site, whatever limits the forward; the next call is planned without it."""
        banned = set(plans)
        if len(self._banned) >= MAX_PLANS:
            self._banned.clear()
        lost = {
            (key, place): plan for key, alike in self._all() for place, plan in alike.copy().items() if plan in banned
        }
        for (key, place), plan in lost.items():
            gone = False
            for known in self.known.values():
                alike = known.get(key, {})
                if (kept := alike.get(place)) is not None and kept.kernel == plan.kernel:
                    gone |= alike.pop(place, None) is not None
            if not gone:  # another thread was first
                continue
            self.bans += 1
            verdict = Verdict(plan.kernel, (refusal_of(plan),))
            if key is not None:
                self._banned[key, place] = (*self.banned(key, place), verdict)

    def _all(self) -> list[tuple[CallKey | None, dict[Place, Plan]]]:
        """What is kept now; other threads go on planning."""
        return [entry for known in self.known.values() for entry in list(known.items())]

    def banned(self, key: CallKey, place: Place) -> tuple[Verdict, ...]:
        """The kernels that lost this site, and why."""
        return self._banned.get((key, place), ())
