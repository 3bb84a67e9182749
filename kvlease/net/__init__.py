"""The two ends of the wire: the producer's endpoint, and the consumer's channel with the leaser that runs on it."""
