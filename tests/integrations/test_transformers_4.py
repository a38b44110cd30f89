"""The same tests with the last transformers 4, which lies beside the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "transformers-4"

if not (FOLDER / "transformers").is_dir():
    pytest.skip(
        "no transformers 4 beside .venv; make .venv/transformers-4 brings it",
        allow_module_level=True,
    )


CODE = """
import sys
sys.path.remove("")  # the folder kernels/ would shadow the package that transformers imports
import pytest, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_families_adapters_and_calls_with_transformers_4():
    tests = [f"tests/integrations/test_{name}.py" for name in ("families", "peft", "patch")]
    chosen = "families or peft or tuple or generation or checkpointing or users_own"
    done = subprocess.run(
        [sys.executable, "-c", CODE, "-q", "-p", "no:cacheprovider", "-k", chosen, *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
