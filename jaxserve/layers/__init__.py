"""The parts that models are made of: pure functions over arrays, one kind a file."""
