"""refusal_of(): keeps other web sites from changing anything here through the browser of ComfyUI's user."""

from __future__ import annotations

from collections.abc import Mapping

JSON = "application/json"
OWN_SITES = ("same-origin", "none")
"""What a browser says of a request of our own page, and of one that no page made."""


def refusal_of(headers: Mapping[str, str]) -> tuple[int, str] | None:
    """Why a request that changes something is refused, as HTTP status and sentence; None for one that is not.

    ``headers`` finds names in lower and upper case, as aiohttp's do. Old versions of ComfyUI check nothing of this, and
    newer ones only on a loopback address.
    """
    # A form on another site can post text without asking first; JSON it cannot: the browser asks the server before
    # (CORS preflight), and ComfyUI allows none unless it is told to.
    if headers.get("Content-Type", "").split(";")[0].strip().lower() != JSON:
        return 415, f"the content type must be {JSON}"
    # Where ComfyUI runs with --enable-cors-header the preflight is allowed, so the browser's word on who asks counts.
    # No page can set this header. "same-site" is another port of this machine, which may be another user's server.
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return None if site.lower() in OWN_SITES else (403, "the request comes from another site")
    # Browsers leave that header out for addresses that are neither https nor localhost, such as ComfyUI on another
    # machine of the network, and old ones always. Origin they all send; a sandboxed page or a file has the origin null.
    origin = headers.get("Origin")
    if origin is not None and origin.partition("://")[2].lower() != headers.get("Host", "").lower():
        return 403, "the request comes from another origin"
    # Without either it is no browser but a program, which could do as much without us. Not answered: a site whose name
    # was made to point to this machine (DNS rebinding) looks like its own page here, as it does to all of ComfyUI.
    return None
