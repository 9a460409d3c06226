"""Real models, real texts, real KV, and what is measured on them."""
