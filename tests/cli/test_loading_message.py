"""The first line that a long command writes to standard error, before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A finder that stops the command where it imports torch.
_PROGRAM = """
import sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("importing torch", file=sys.stderr)
            raise SystemExit(0)

sys.meta_path.insert(0, Stop())
from bmforge.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        "generate model",
        "chat model",
        "serve model",
        "quantize model out",
        "convert model out",
        "merge adapter --out out",
        f"evaluate model --text {__file__}",
        f"train conversations --model gpt2 --data {__file__}",
    ],
)
def test_loading_is_reported_before_torch_is_imported(arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments.split()], capture_output=True, text=True
    )
    assert done.stderr.splitlines() == ["loading PyTorch ...", "importing torch"]
    assert not done.stdout


def test_help_does_not_report_loading() -> None:
    for arguments in (["generate", "--help"], ["train", "conversations", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True
        )
        assert "PyTorch" not in done.stderr
