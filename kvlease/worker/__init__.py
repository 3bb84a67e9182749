"""What runs in vLLM's worker processes: pages, plans, NIXL and the transfer thread. No vLLM in here."""
