"""The runs of a process: kept newest first, told of at most so often, and the last word is the summary."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from sage_core.live import MAX_KEPT, Live, Record
from sage_core.selection import Plan
from sage_core.stats import OUTSIDE, Run
from tests.unit.conftest import make_spec

A = Plan("a", make_spec(), None)
ABOUT = {"policy": {"kernel": "a"}, "previous_override": None}


def a_run(apply_node_id: str = "5", model: str = "Flux") -> Run:
    run = Run(1, "prompt", "3", model, apply_node_id)
    run.total_steps = 2
    return run


class Clock:
    """The sleep of the thread: it goes on when the test says so, and tells when it is asleep again."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._go, self._asleep = threading.Semaphore(0), threading.Semaphore(0)

    def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        self._asleep.release()
        assert self._go.acquire(timeout=10)

    def wait_until_asleep(self) -> None:
        assert self._asleep.acquire(timeout=10)

    def tick(self) -> None:
        self._go.release()


class Followed:
    """A Live with such a clock, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.clock = Clock()
        self.live = Live(self.sent.append, sleep=self.clock.sleep)

    def add(self, run: Run) -> Run:
        self.live.add(run, "workflow", ABOUT)
        return run

    def tick(self) -> list[dict[str, Any]]:
        """What is sent at the next look, while a run is left to look at afterwards."""
        before = len(self.sent)
        self.clock.tick()
        self.clock.wait_until_asleep()
        return self.sent[before:]

    def last_tick(self) -> list[dict[str, Any]]:
        """What is sent at the next look, which is the last one."""
        before, thread = len(self.sent), self.live._thread
        assert thread is not None
        self.clock.tick()
        thread.join(10)
        assert not thread.is_alive()
        return self.sent[before:]

    def end(self) -> None:
        """End what is open, and so the thread."""
        if self.live._thread is not None:
            for record in list(self.live._open):
                record.run.close("finished")
            self.last_tick()


@pytest.fixture
def followed() -> Iterator[Followed]:
    followed = Followed()
    yield followed
    followed.end()


def test_a_run_is_told_of_as_it_goes_and_summed_up_at_its_end(followed: Followed) -> None:
    run = followed.add(a_run())
    followed.clock.wait_until_asleep()
    assert followed.sent == []
    (first,) = followed.tick()
    assert first["summary"] == run.progress_line() == "Step 1 of 2: the first model call is under way"
    run.record([A, A])
    run.step = 1
    (second,) = followed.tick()
    assert (second["status"], second["steps"], second["seconds"]) == ("running", 1, None)
    assert second["summary"] == "Step 2 of 2: a serves 100.0% of 2 calls"
    run.step = 2
    run.close("finished")
    (last,) = followed.last_tick()
    assert (last["status"], last["steps"], last["summary"]) == ("finished", 2, "a served 100.0% of 2 calls")
    assert {event["uid"] for event in followed.sent} == {run.uid}
    assert last == {
        "schema": 1,
        "uid": run.uid,
        "workflow_id": "workflow",
        "prompt_id": "prompt",
        "node_id": "3",
        "apply_node_id": "5",
        "model": "Flux",
        "started": round(run.started, 3),
        "seconds": round(run.seconds, 3),
        "status": "finished",
        "steps": 2,
        "total_steps": 2,
        "summary": "a served 100.0% of 2 calls",
    }
    assert set(followed.clock.asked) == {0.5}


def test_nothing_is_sent_twice(followed: Followed) -> None:
    run = followed.add(a_run())
    followed.clock.wait_until_asleep()
    assert len(followed.tick()) == 1
    assert followed.tick() == []
    run.record([A])
    assert len(followed.tick()) == 1


def test_a_short_run_has_its_summary_only_and_the_thread_ends_with_it(followed: Followed) -> None:
    followed.add(a_run()).close("finished")
    followed.clock.wait_until_asleep()
    assert [event["status"] for event in followed.last_tick()] == ["finished"]
    assert followed.live._thread is None
    followed.add(a_run()).close("interrupted")
    followed.clock.wait_until_asleep()
    assert [event["status"] for event in followed.last_tick()] == ["interrupted"]


def test_of_two_runs_of_one_node_the_later_is_told_of_and_other_nodes_have_their_own(followed: Followed) -> None:
    first = followed.add(a_run("5"))
    followed.clock.wait_until_asleep()
    followed.tick()
    first.close("finished")
    second, other = followed.add(a_run("5")), followed.add(a_run("12:5"))
    assert {event["uid"] for event in followed.tick()} == {second.uid, other.uid}
    assert [record.run for record in followed.live._open] == [second, other]


def test_what_was_said_goes_with_the_run_although_runs_follow_each_other_without_a_gap(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told(dict[str, Any]):
        """One that can be referred to without being kept."""

    told: list[weakref.ref[Told]] = []
    status = Record.status

    def noted(record: Record) -> Told:
        said = Told(status(record))
        told.append(weakref.ref(said))
        return said

    monkeypatch.setattr(Record, "status", noted)
    before = followed.add(a_run())
    followed.clock.wait_until_asleep()
    thread = followed.live._thread
    for _ in range(3 * MAX_KEPT):
        run = followed.add(a_run())
        before.close("finished")
        followed.tick()
        followed.sent.clear()
        before = run
    assert followed.live._thread is thread
    assert len(told) >= 3 * MAX_KEPT
    assert sum(said() is not None for said in told) <= MAX_KEPT


def test_calls_outside_a_sampler_are_kept_and_not_waited_for(followed: Followed) -> None:
    run = followed.add(a_run(model=OUTSIDE))
    assert followed.live._thread is None
    assert followed.live.find(run.uid) is not None


def test_the_last_runs_are_kept_newest_first(followed: Followed) -> None:
    runs = [followed.add(a_run(model=OUTSIDE)) for _ in range(MAX_KEPT + 3)]
    assert [record.run for record in followed.live.newest_first()] == runs[:2:-1]
    assert followed.live.find(runs[0].uid) is None
    found = followed.live.find(runs[-1].uid)
    assert found is not None
    assert (found.run, found.about) == (runs[-1], ABOUT)


class EndsWhileLookedAt(Run):
    """Ends between the question whether it has and the next one."""

    is_looked_at = False

    @property
    def started(self) -> float:
        if self.is_looked_at:
            self.is_looked_at = False
            self.close("finished")
        return 0.0

    @started.setter
    def started(self, _: float) -> None:
        """It is set when the run is made."""


def test_a_run_that_ends_while_it_is_looked_at_is_told_of_once_more(followed: Followed) -> None:
    run = EndsWhileLookedAt(1, "prompt", "3", "Flux", "5")
    followed.add(run)
    followed.clock.wait_until_asleep()
    run.is_looked_at = True
    assert [event["status"] for event in followed.tick()] == ["running"]
    assert [event["status"] for event in followed.last_tick()] == ["finished"]
