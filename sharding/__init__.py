"""How a model is divided over chips, and the declaration of a weight that all of it follows from."""
