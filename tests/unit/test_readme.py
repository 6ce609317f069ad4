"""The README says what the code says: kernels, GPU table, inputs, reasons, commands, files and links."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import pytest

import dev
from sage_core import (
    AUTO,
    BACKENDS,
    COMPARE_CHOICES,
    KERNEL_CHOICES,
    NATIVE_ONLY,
    SMOOTH_K_CHOICES,
    TOLERANCES,
    UNAVAILABLE_CHOICES,
    Dispatcher,
    candidates,
    comparing,
    ranking,
    session,
)
from sage_core.accuracy import sample_rows
from sage_core.backends import (
    STARTING_ORDER,
    Backend,
    Preference,
    comfy_kitchen,
    flash_attention,
    hub,
    sageattention,
    sageattn3,
)
from sage_core.backends.base import Tolerance
from sage_core.planning import Planner
from sage_core.refusal import ADVICE, RefusalCode
from sage_core.selection import select
from sage_core.stats import Run
from sage_core.support import Support

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE_BLOCKS = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
TEXT = CODE_BLOCKS.sub("", README)
QUOTED = re.findall(r"`([^`\n]+)`", TEXT)
LOOKS_LIKE_A_KERNEL = re.compile(r"(sageattn|sdpa: |flash_attn |hub: |comfy_kitchen_|int8_|native \()")
NO_KERNEL = {"hub: ...", "sageattention", "sageattention3_blackwell"}
"""All Hub kernels in one word as in the node's tooltip, a package, and a folder of its repository."""
INSTALL = (
    *(sageattention.INSTALL_1, sageattention.INSTALL_2, sageattn3.INSTALL, comfy_kitchen.INSTALL, hub.INSTALL),
    *(flash_attention.INSTALL_2, flash_attention.INSTALL_3, flash_attention.INSTALL_4),
)


def section(title: str) -> str:
    """The text from the heading ``title`` to the next heading of its level or above."""
    level, rest = re.split(rf"^(##+) {re.escape(title)}$", TEXT, maxsplit=1, flags=re.MULTILINE)[1:]
    return re.split(rf"^#{{2,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every row of every table, headings and rulers left out."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in t.splitlines()[2:]] for t in found]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# -- what it promises


def test_numbers_of_the_promises_are_those_of_the_code() -> None:
    promises = " ".join(section("What it promises today").split())
    side = math.isqrt(candidates.MIN_SCORES)
    rows = inspect.signature(sample_rows).parameters["count"].default
    for said in (
        f"takes {ranking.MARGIN * 100:g} % less than the best exact one",
        f"takes {ranking.NOISE * 100:g} % less than native",
        f"fewer than {side} x {side} query times key tokens",
        "2 model calls more",
        f"faster by {comparing.NOISE * 100:g} %",
        f"less than {candidates.DEVICE_BOUND_MS:g} ms",
        f"by {['no', 'one', 'two', 'three'][comparing.LIMIT_ROUNDS]} native model calls more",
        f"unless it comes {['no', 'one', 'two', 'three'][session.FILE_ERRORS_IN_A_ROW]} times in a row",
        f"up to {rows} sampled query rows",
    ):
        assert said in promises


def checked_steps(total: int) -> list[int]:
    run = Run(1, None, None)
    run.total_steps = total
    checked = []
    for step in range(total):
        run.step = step
        checked += [step] if run.takes_check() else []
    return checked


def test_steps_of_the_checks_are_those_of_the_code() -> None:
    assert checked_steps(20) == [0, 5, 10, 15]
    assert checked_steps(16) == [0, 4, 8, 12]
    assert checked_steps(15) == [0, 5, 10]
    assert [checked_steps(total) for total in (10, 8, 4, 2, 1)] == [[0, 5], [0, 4], [0, 2], [0, 1], [0]]
    assert "fewer than 16 steps it is one step in five, but at least two" in section("What it promises today")
    assert "the first, and a quarter, half and three quarters" in section("What it promises today")


# -- kernels


def test_every_kernel_that_is_named_exists() -> None:
    named = {text for text in QUOTED if LOOKS_LIKE_A_KERNEL.match(text)}
    assert named - NO_KERNEL <= set(KERNEL_CHOICES)


@pytest.mark.parametrize("name", KERNEL_CHOICES)
def test_every_choice_of_kernel_is_explained(name: str) -> None:
    assert name in quoted(section("Every kernel"))


def test_kernels_have_a_row_each_in_the_order_of_the_node() -> None:
    (rows,) = tables(section("Every kernel"))
    assert [row[0] for row in rows] == [f"`{name}`" for name in KERNEL_CHOICES if name not in (AUTO, NATIVE_ONLY)]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_row_of_a_kernel_has_its_limits(backend: Backend) -> None:
    (rows,) = tables(section("Every kernel"))
    (row,) = [row for row in rows if row[0] == f"`{backend.name}`"]
    _, _, devices, head_dim, attn_mask = row
    support = backend.support
    assert devices == ("any" if support.archs is None else ", ".join(support.archs))
    assert attn_mask == ", ".join(kind.value for kind in support.mask_kinds)
    if support.head_dims is not None:
        assert re.split(", | or ", head_dim) == list(map(str, support.head_dims))
    elif support.max_head_dim is not None:
        assert head_dim == f"up to {support.max_head_dim}"
    elif not support.rules:
        assert head_dim == "any"


def test_kernels_that_auto_never_takes_are_named() -> None:
    (named,) = re.findall(r"`auto` never takes (.*?): choose", section("Every kernel"), flags=re.DOTALL)
    assert quoted(named) == [backend.name for backend in BACKENDS if not backend.auto]


# -- what auto tries, and what to install


def described(place: int, preference: Preference) -> str:
    head_dims = preference.head_dims
    limit = "" if head_dims is None else f", head_dim {' or '.join(map(str, head_dims))}"
    return f"{place}. `{preference.kernel}` from {preference.min_qo_len:,} tokens{limit}"


def test_gpu_table_is_the_starting_order() -> None:
    gpus, _ = tables(section("Your GPU: what auto tries, what to install"))
    expected = {
        arch: [described(place, preference) for place, preference in enumerate(order, 1)]
        for arch, order in STARTING_ORDER.items()
    }
    assert {row[1]: row[2].split("<br>") for row in gpus} == expected
    assert len(gpus) == len(expected)


def test_gpu_table_names_a_package_for_every_kernel_of_its_row() -> None:
    gpus, packages = tables(section("Your GPU: what auto tries, what to install"))
    package_of = {kernel: row[0] for row in packages for kernel in quoted(row[1])}
    for _, arch, kernels, to_install, _ in gpus:
        needed = {package_of[kernel] for kernel in quoted(kernels) if kernel in package_of}
        assert needed == {package for package in package_of.values() if package in to_install}, arch


def test_packages_are_given_for_exactly_the_kernels_that_need_one() -> None:
    _, packages = tables(section("Your GPU: what auto tries, what to install"))
    listed = [kernel for row in packages for kernel in quoted(row[1])]
    assert sorted(listed) == sorted(backend.name for backend in BACKENDS if backend.package)


@pytest.mark.parametrize("install", INSTALL)
def test_how_to_install_is_what_the_refusals_say(install: str) -> None:
    # double quotes mean the same in every shell; Windows takes single ones as they are
    for part in re.findall(r"pip install .*|https://\S+\w", install.replace("'", '"')):
        assert part in README


# -- inputs and reasons


@pytest.mark.parametrize(
    ("file", "table"), [("nodes/patch_attention.py", 0), ("nodes/attention_report.py", 1)], ids=["apply", "report"]
)
def test_every_input_of_a_node_is_described(file: str, table: int) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    inputs = re.findall(r'io\.\w+\.Input\(\s*"(\w+)"', source)
    assert inputs
    assert [row[0] for row in tables(section("The inputs"))[table]] == [f"`{name}`" for name in inputs]


@pytest.mark.parametrize("choice", [*SMOOTH_K_CHOICES, *UNAVAILABLE_CHOICES, *TOLERANCES, *COMPARE_CHOICES])
def test_every_choice_of_the_other_inputs_is_named(choice: str) -> None:
    assert choice in quoted(section("The inputs"))


def test_every_reason_that_the_code_gives_is_explained_and_no_other() -> None:
    (rows,) = tables(section("Troubleshooting"))
    explained = [code for row in rows for code in quoted(row[0])]
    files = [file for file in (ROOT / "sage_core").rglob("*.py") if file.name != "refusal.py"]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    given = {code.value for code in RefusalCode if re.search(rf"RefusalCode\.{code.name}\b", source)}
    assert sorted(explained) == sorted(given)


@pytest.mark.parametrize("named", ["head", "attn_mask"])
def test_what_can_be_too_large_for_32_bits_is_named(named: str) -> None:
    (rows,) = tables(section("Troubleshooting"))
    (row,) = [row for row in rows if quoted(row[0]) == ["offset"]]
    assert named in row[1]
    assert named in ADVICE[RefusalCode.OFFSET]


@pytest.mark.parametrize("title", ["Why not", "Shapes", "Measured for one call", "Sites", "What happened", "Machine"])
def test_every_part_of_the_report_is_explained(title: str) -> None:
    assert title in (ROOT / "sage_core" / "report.py").read_text(encoding="utf-8")
    assert f"**{title}**" in section("How to read the report")


def test_messages_to_look_up_are_those_that_are_shown() -> None:
    files = [*(ROOT / "sage_core").rglob("*.py")]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    messages = re.findall(r'^\*\*"([^"]+)"', section("Troubleshooting"), flags=re.MULTILINE)
    assert messages
    assert not [message for message in messages if message not in source]


# -- commands, files and links


def test_commands_exist() -> None:
    commands = set(re.findall(r"python dev\.py (\w+)", README))
    assert {"demo", "test"} <= commands
    for command in commands:
        assert callable(dev.parse([command])[0].command)


def test_options_of_the_demo_exist() -> None:
    (paragraph,) = re.findall(r"^- `python dev\.py demo`.*?(?=^- |\n\n)", README, flags=re.DOTALL | re.MULTILINE)
    options = re.findall(r"`(--\w+)(?: (NAME|NUMBER))?`", paragraph)
    assert options
    for option, value in options:
        dev.parse(["demo", option, *{"": [], "NAME": ["auto"], "NUMBER": ["8188"]}[value]])


def test_versions_of_comfyui_are_those_of_the_commands() -> None:
    versions = set(re.findall(r"\b0\.\d+\.\d+\b", section("For contributors")))
    assert versions == {carried.version for carried in dev.CARRIED}
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = re.search(r"It needs ComfyUI (\S+) or newer and Python (\S+) or newer", README)
    assert oldest is not None
    assert f'requires-comfyui = ">={oldest[1]}"' in metadata
    assert f'requires-python = ">={oldest[2]}"' in metadata


def test_files_that_are_named_exist() -> None:
    files = [text for text in QUOTED if re.fullmatch(r"[\w./-]+(\.(py|md|js|toml)|/)", text) and text != "main.py"]
    assert files
    assert not [file for file in files if not (ROOT / file).exists()]
    assert (ROOT / "benchmarks" / "overhead.py").exists()


def test_every_file_of_the_core_has_its_place_on_the_map() -> None:
    (rows,) = tables(section("Where things are"))
    mapped = {file for row in rows for file in quoted(row[0])}
    small = {"__init__.py", "device.py", "blockwise.py"}
    core = {f"sage_core/{file.name}" for file in (ROOT / "sage_core").glob("*.py") if file.name not in small}
    assert core <= mapped


def test_links_and_pictures_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", TEXT, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    targets = re.findall(r"\]\(([^)\s]+)\)", TEXT)
    assert {"docs/images/apply_node.png", "docs/images/report_node.png"} <= set(targets)
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (ROOT / target).is_file(), target


def test_functions_that_are_named_exist() -> None:
    assert {"Dispatcher.attend", "Planner.plan", "select"} <= set(quoted(section("Where things are")))
    assert callable(Dispatcher.attend)
    assert callable(Planner.plan)
    assert callable(select)


def test_example_of_a_kernel_uses_fields_that_exist() -> None:
    (example,) = [block for block in CODE_BLOCKS.findall(README) if block.startswith("```python")]
    for type_ in (Support, Tolerance):
        (arguments,) = re.findall(rf"{type_.__name__}\((.*)\)", example)
        assert set(re.findall(r"(\w+)=", arguments)) <= inspect.signature(type_).parameters.keys()
    fields = set(re.findall(r"^    (\w+)=", example, flags=re.MULTILINE))
    parameters = inspect.signature(Backend).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    assert required <= fields <= parameters.keys()
