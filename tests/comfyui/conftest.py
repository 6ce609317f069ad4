from __future__ import annotations

from collections.abc import Iterator

import pytest

from comfyui_server import Server
from hosts import Host, all_hosts


@pytest.fixture(scope="session", params=all_hosts(), ids=lambda host: host.name)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """Each ComfyUI in turn; `host.run("scenarios_x:function", ...)` runs inside it."""
    if request.param.missing:
        pytest.skip(request.param.missing)
    yield request.param
    request.param.close()


@pytest.fixture(scope="session")
def server(host: Host) -> Iterator[Server]:
    """A running ComfyUI server of each host, with the pack and the stand-ins in custom_nodes."""
    with Server(host.root) as running:
        yield running
