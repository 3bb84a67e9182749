"""What the demo and the engine tests share; not part of the installed package.

- `devtools.model`: a small real model with no model hub;
- `devtools.prompts`: deterministic prompts of an exact number of tokens;
- `devtools.engines`: real vLLM engines as subprocesses that never outlive us, one set at a time per machine.
"""
