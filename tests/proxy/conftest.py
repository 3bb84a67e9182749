"""Put the example, which is a directory of scripts, and this directory's helpers on the path."""

import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
for _path in (_HERE, _HERE.parents[1] / "examples" / "proxy"):
    if str(_path) not in sys.path:
        sys.path.insert(0, str(_path))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
