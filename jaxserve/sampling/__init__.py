"""How the next token is chosen: what a request may ask for, and the part of the jitted step that does it."""
