"""Every command and every Python block of the pages is run as it is written.

Python blocks run with the quick tests, each with names of its own, in an empty directory per page.
Whole pages, commands and Python in order, are long.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_outputs import unprinted_lines
from page_places import PLACES
from pages import PAGES, ROOT, RUNNING, Block, page_blocks

from bmforge.parallel import shutdown_distributed

OF_THE_ROOT = ("examples", "dev", "benchmarks")  # commands name them as seen from there
SERVER = "server"  # named by blocks that need the server which an earlier block started
SHOWN = RUNNING | {"text", "json", "toml"}
ALL = {str(page.relative_to(ROOT)): list(page_blocks(page)) for page in PAGES}
RUN = {  # the two READMEs have the same code
    page: found
    for page, all_of in ALL.items()
    if page != "README-ZH.md"
    and (found := [block for block in all_of if block.language in RUNNING and not block.not_run])
}


def quick(page: str) -> list[Block]:
    """The Python blocks that need no other page and no command before them."""
    return [
        block for block in RUN[page] if block.language == "python" and set(block.needs) <= {*PLACES}
    ]


def bring(place: Path, needs: tuple[str, ...], pages: Path) -> None:
    """Put what a block needs into its directory: places, or all that an earlier page left."""
    for name in needs:
        if name in PLACES:
            if not (place / name).exists():
                PLACES[name](place)
        else:
            own = shutil.ignore_patterns(*OF_THE_ROOT)
            shutil.copytree(run_page(name, pages), place, dirs_exist_ok=True, ignore=own)


def run_page(page: str, pages: Path) -> Path:
    """The directory in which a page was run from its first block to its last."""
    place = pages / page.replace("/", "-")
    if not place.exists():
        place.mkdir()
        for folder in OF_THE_ROOT:
            (place / folder).symlink_to(ROOT / folder)
        printed = ""  # by the commands of the block before
        with contextlib.ExitStack() as servers:
            for block in ALL[page]:
                if block.language == "text" and printed and not block.not_run:
                    missing = unprinted_lines(block.body, printed)
                    assert not missing, f"{block}: {missing}"
                if block.port:
                    servers.close()  # the port is that of an earlier block's server
                    bring(place, block.needs, pages)
                    servers.enter_context(serving(block, place))
                    continue
                printed = run_block(block, place, pages) if block in RUN[page] else ""
    return place


def run_block(block: Block, place: Path, pages: Path) -> str:
    """Run a block after what it needs; returns the output of commands, "" for Python."""
    page = str(block.page.relative_to(ROOT))
    # What this page and its server bring is there already.
    bring(place, tuple(name for name in block.needs if name not in (page, SERVER)), pages)
    if block.language == "python":
        run_python(block, place)
        return ""
    return run_commands(block, place)


def run_python(block: Block, place: Path) -> None:
    """In this process, as a module of its own."""
    before = Path.cwd()
    os.chdir(place)
    try:
        exec(compile(block.body, str(block), "exec"), {"__name__": "example"})
    finally:
        shutdown_distributed()
        os.chdir(before)


def shortened(block: Block) -> Iterator[str]:
    """The block's lines, with what its comment adds behind each command that trains."""
    for line in block.body.replace("\\\n", " ").splitlines():
        trains = "bmforge train " in line and "--help" not in line
        yield f"{line.partition(' #')[0]} {block.added}" if trains and block.added else line


def page_environment() -> dict[str, str]:
    """The environment of a page's commands."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": paths, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def serving(block: Block, place: Path, timeout_s: float = 180) -> Iterator[None]:
    """Run a block's server until the context ends; tests share the port one after the other."""
    with contextlib.ExitStack() as stack:
        lock = Path(tempfile.gettempdir()) / f"bmforge-test-port-{block.port}"
        fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        assert not is_healthy(block.port), f"port {block.port} is in use by another program"
        log = stack.enter_context((place / "server.log").open("w+"))
        server = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", block.body],
            cwd=place,
            env=page_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + timeout_s
            while not is_healthy(block.port):
                alive = server.poll() is None and time.monotonic() < end
                assert alive, f"{block}\n{(place / 'server.log').read_text()[-3000:]}"
                time.sleep(0.3)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def is_healthy(port: int) -> bool:
    """Return True if a server answers on this port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def run_commands(block: Block, place: Path) -> str:
    """In a shell that stops at the first failure; returns the output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(shortened(block))],
        cwd=place,
        env=page_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == block.status, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.mark.parametrize("page", ALL)
def test_blocks_say_what_they_are(page: str) -> None:
    """Every block has a language, and what its comments name is there."""
    for block in ALL[page]:
        assert block.language in SHOWN, f"{block}: {block.language!r} is not one of {SHOWN}"
        unknown = set(block.needs) - {*PLACES, *RUN, SERVER}
        assert not unknown, f"{block} needs {unknown}, which nobody makes"


@pytest.mark.parametrize("page", [page for page in RUN if quick(page)])
def test_python_blocks_run(page: str, tmp_path: Path, pages: Path) -> None:
    for block in quick(page):
        bring(tmp_path, block.needs, pages)
        run_python(block, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", RUN)
def test_pages_run_whole(page: str, pages: Path) -> None:
    run_page(page, pages)


def test_a_wrong_block_would_be_seen(tmp_path: Path) -> None:
    """The tests above can fail: a command that fails, and Python that raises, do."""
    for language, body in (("bash", "false\ntrue"), ("python", "assert 1 == 2")):
        block = Block(ROOT / "README.md", 1, language, body)
        with pytest.raises(AssertionError):
            (run_python if language == "python" else run_commands)(block, tmp_path)


def test_a_changed_output_would_be_seen(tmp_path: Path) -> None:
    """Other words are reported; other numbers and directories are not."""
    command = "echo wrote 12 files to /tmp/a/runs; echo done 3>&1"
    printed = run_commands(Block(ROOT / "README.md", 1, "bash", command), tmp_path)
    assert unprinted_lines("wrote 7 files to /home/b/runs\n...\ndone\n", printed) == []
    started = "GPT2, on 1 x {}; run directory {}"
    printed_start = started.format("Intel(R) Xeon(R) Processor", "runs/a")
    assert unprinted_lines(started.format("AMD EPYC", "runs/a"), printed_start) == []
    assert unprinted_lines(started.format("AMD EPYC", "runs/b"), printed_start) != []
    assert unprinted_lines("saved 7 files to /home/b/runs\n", printed) != []
