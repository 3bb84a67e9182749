"""kvlease: a KV connector for vLLM whose prefill/decode handoffs are leases, verified before they are used."""

__version__ = "0.1.0"
