"""Requests that change something: only from our own page, or from a program that is no browser."""

from __future__ import annotations

import pytest

from sage_core.same_origin import refusal_of

HERE = "127.0.0.1:8188"


def status(**headers: str) -> int | None:
    named = {name.replace("_", "-").title(): value for name, value in headers.items()}
    refusal = refusal_of({"Host": HERE, "Content-Type": "application/json", **named})
    return None if refusal is None else refusal[0]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content_type": "application/json; charset=utf-8"},
        {"content_type": "Application/JSON"},
        {"sec_fetch_site": "same-origin", "origin": f"http://{HERE}"},
        {"sec_fetch_site": "none"},
        {"origin": f"http://{HERE}"},
        {"origin": "http://BOX.lan:8188", "host": "box.lan:8188"},
        # behind a proxy that changes Host, the browser's own word counts
        {"sec_fetch_site": "same-origin", "origin": "https://comfy.example", "host": HERE},
    ],
)
def test_our_own_page_and_programs_may(headers: dict[str, str]) -> None:
    assert status(**headers) is None


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_form_of_another_site_can_send_is_refused(content_type: str) -> None:
    assert status(content_type=content_type, sec_fetch_site="same-origin") == 415


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "origin": "http://127.0.0.1:9000"},
        {"sec_fetch_site": "cross-site", "origin": f"http://{HERE}"},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9000"},
        {"origin": f"http://{HERE}.evil.example"},
        {"origin": "null"},
        {"origin": ""},
    ],
)
def test_other_sites_may_not(headers: dict[str, str]) -> None:
    assert status(**headers) == 403
