"""The GPU check works where there is no GPU: in host memory, and it says when it has nothing to do."""

from __future__ import annotations

import pytest
import torch

from .check import main


@pytest.mark.peer
def test_it_checks_host_memory_when_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("all equal") == 4
    assert "commit alone" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the check itself")
def test_without_a_gpu_it_says_so_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Skipped: torch sees no GPU")
