"""Which codec mode a link pays for: arithmetic on measured speeds. Knows no vLLM and no storage."""
