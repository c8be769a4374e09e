"""Prompts computed by one engine and continued by another: what travels, who keeps it, and until when."""
