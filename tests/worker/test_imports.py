"""What moves bytes runs where vLLM is not installed: with other engines, and in the GPU check."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import kvlease.core
import kvlease.net
import kvlease.worker

PACKAGES = (kvlease.core, kvlease.net, kvlease.worker)
MODULES = [
    found.name for package in PACKAGES for found in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
]


def test_it_all_is_imported_without_vllm() -> None:
    names = ", ".join(["kvlease.testing", "devtools.pair", *MODULES])
    script = f"import sys; sys.modules['vllm'] = None\nimport {names}"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_connector_is_what_needs_vllm() -> None:
    script = "import sys; sys.modules['vllm'] = None\nimport kvlease.connector.worker"
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", script], check=True, stderr=subprocess.DEVNULL)
