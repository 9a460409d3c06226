"""The codec written to be read: the bytes that every other form must reproduce."""
