"""What a model costs on a chip, in bytes and seconds, from its sizes alone."""
